"""`--audit`: at random steps every rank recomputes a lane of another rank, and the ranks compare bits.

Which steps, which lanes and which pairs of ranks are pure functions of seed and step. Every rank can make the pixels
of any sample, so only digests are exchanged. All ranks audit in the same step: they would wait for each other anyway.
After a difference all ranks vote (audit_votes.py). The run then ends on every rank with the name of the faulty one,
and the supervisor restarts it without this rank, from the newest checkpoint before the last audit that found nothing.
A single rank computes its lane twice, and once per epoch trains a small model whose weights are known.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

import torch
from torch import Tensor

from paceline.data.loader import Batch
from paceline.errors import CorruptionError
from paceline.parallel.collectives import gather_rows, gather_texts, wait_for_all
from paceline.runs.folder import RunFolder, write_atomically
from paceline.runtime.detect import World, name_machine
from paceline.settings.audit import parse_audit
from paceline.settings.small_files import read_small, write_plain
from paceline.training.audit_plan import NO_MAJORITY, audited_steps, name_device
from paceline.training.audit_votes import Digest, Dispute, Verdict, judge
from paceline.training.known_training import KNOWN_HASH, train_alone
from paceline.training.session import TrainingSession
from paceline.training.step import StepReport

_LARGEST_LIST_BYTES = 1_000_000


def audit_step(session: TrainingSession, batch: Batch, report: StepReport) -> None:
    """Compare this step's lanes with a second computation. Raises CorruptionError on all ranks. Collective."""
    audit, world = batch.audit, session.world
    if audit is None or report.lane_digest is None:
        return
    step, number = session.components.step, session.state.step
    again = step.recompute_lane(audit.share or batch, number, audit.rank, audit.lane)
    session.guards.enter("reduce", number + 1)
    rows = _gather(torch.stack([report.lane_digest, again]), world)
    distance = (audit.rank - world.rank) % world.world_size
    differing = [
        (rank, (rank + distance) % world.world_size)
        for rank in range(world.world_size)
        if not torch.equal(rows[rank, 1], rows[(rank + distance) % world.world_size, 0])
    ]
    if not differing:
        if world.world_size == 1:
            _check_known_weights(session)
        session.state.audited = number + 1
        session.state.audits += 1
        return
    disputes = [
        Dispute(owner, auditor, _digest(rows[owner, 0]), _digest(rows[auditor, 1]), _vote(session, owner, audit.lane))
        for auditor, owner in differing
    ]
    suspects = sorted({rank for pair in differing for rank in pair})
    _end_run(session, judge(disputes), suspects, audited=session.state.audited)


def _check_known_weights(session: TrainingSession) -> None:
    """A processor that is always wrong gives the same wrong bits twice, but not the known weights.

    This is checked in the first audit of an epoch. So after a difference, steps since the check before are doubtful.
    """
    world, faults, number = session.world, session.guards.faults, session.state.step
    checks = _checks_of_known_weights(session, number + 1)
    if number not in checks:
        return
    if train_alone(world.device, lambda: faults is not None and faults.has_lasting_flip(number + 1)) == KNOWN_HASH:
        return
    known_weights = len(session.components.step.digested_names())
    earlier = [step + 1 for step in checks if step < number]
    verdict = Verdict(world.rank, known_weights, is_permanent=True)
    _end_run(session, [verdict], [], audited=max(earlier, default=0))


def _checks_of_known_weights(session: TrainingSession, end: int) -> list[int]:
    """The first audited step of each epoch, up to before `end`."""
    clock, seed, share = session.components.plan.clock, session.config.train.seed, session.config.guard.audit
    epochs = range(clock.first_epoch, clock.locate(end - 1)[0] + 1)
    audits = [
        audited_steps(clock.end_of(epoch), clock.end_of(epoch + 1), seed=seed, share=parse_audit(share))
        for epoch in epochs
    ]
    return [step for step in (next(steps, end) for steps in audits) if step < end]


def audit_bad_step(session: TrainingSession) -> None:
    """After a step with a loss or gradient that is not finite: is a faulty rank the cause? Collective.

    Under --audit every rank computes a lane of each rank again. If a majority agrees against a rank, it is named.
    """
    world = session.world
    if not parse_audit(session.config.guard.audit) or world.world_size <= NO_MAJORITY:
        return
    disputes = []
    for owner in range(world.world_size):
        votes = _vote(session, owner, lane=0)
        auditor = (owner + 1) % world.world_size
        if len(set(votes)) > 1:
            disputes.append(Dispute(owner, auditor, votes[owner], votes[auditor], votes))
    found = judge(disputes)
    if found:
        _end_run(session, found, [], audited=session.state.audited)


def _gather(row: Tensor, world: World) -> Tensor:
    return (gather_rows(row, world) if world.world_size > 1 else row[None]).cpu()


def _digest(row: Tensor) -> Digest:
    return tuple(row.tolist())


def _vote(session: TrainingSession, owner: int, lane: int) -> list[Digest]:
    """Every rank computes this lane again, from pixels that it makes itself. Collective."""
    config, state, components = session.config, session.state, session.components
    epoch, inside = components.plan.clock.locate(state.step)
    share = next(
        components.train_data.of_rank(owner).train_epoch(
            seed=config.train.seed,
            epoch=epoch,
            global_batch_size=config.train.global_batch_size,
            first_step=inside,
            batch_scale=components.step.objective.batch_scale,
        )
    )
    mine = components.step.recompute_lane(share, state.step, owner, lane)
    session.guards.enter("reduce", state.step + 1)
    return [_digest(row) for row in _gather(mine, session.world)]


# --- After a difference


def _end_run(session: TrainingSession, found: list[Verdict], suspects: list[int], *, audited: int) -> NoReturn:
    """Write down what was found, set aside checkpoints that may be wrong, and end the run on all ranks. Collective.

    `audited`: the last step that is known to be right.
    """
    world, state = session.world, session.state
    mine = {"rank": world.rank, "host": name_machine(), "device": world.device, "name": name_device(world)}
    places = [json.loads(text) for text in gather_texts(json.dumps(mine), world)]
    session.guards.enter("save", state.step + 1)
    session.checkpoints.wait()
    names = [*session.components.step.digested_names(), "the known weights of a short training"]
    rows = [
        {
            **places[verdict.rank],
            "step": state.step + 1,
            "tensor": names[verdict.tensor],
            "is_permanent": verdict.is_permanent,
            "audited_step": audited,
        }
        for verdict in found
    ] or [{"rank": None, "suspects": suspects, "step": state.step + 1, "audited_step": audited}]
    if world.is_primary:
        session.folder.require_owner()
        text = "".join(json.dumps(row) + "\n" for row in rows)
        write_plain(session.folder.audits, text.encode(), appends=True)
        if found:
            _exclude(session.folder, [places[verdict.rank]["host"] for verdict in found])
        session.checkpoints.branch_at(audited)
    wait_for_all(world)  # before any rank ends: the supervisor would end the primary
    hosts = {place["host"] for place in places}
    raise _named(rows[0], len(rows), hosts, session) if found else _undecided(rows[0], places)


def _exclude(folder: RunFolder, hosts: list[str]) -> None:
    """Add hosts to the run's exclude list, in the form that `srun --exclude` and `paceline doctor` use."""
    before = read_excluded(folder)
    write_atomically(folder.exclude, ",".join(dict.fromkeys([*before, *hosts])) + "\n")


def read_excluded(folder: RunFolder) -> list[str]:
    try:
        text = read_small(folder.exclude, _LARGEST_LIST_BYTES).decode(errors="replace")
    except (OSError, ValueError):
        return []
    return [host for host in text.strip().split(",") if host]


def _named(row: dict[str, Any], count: int, hosts: set[str], session: TrainingSession) -> CorruptionError:
    others = f"; {count - 1} more in audit.jsonl" if count > 1 else ""
    again = "also when it computed them again" if row["is_permanent"] else "but not when it computed them again"
    got = f"other gradients than the other ranks computed, {again}"
    if session.world.world_size == 1:
        healthy = "other weights than every healthy processor computes"
        got = healthy if row["is_permanent"] else "other bits than when it computed them again"
    hint = f"sbatch --exclude=$(cat {session.folder.exclude}) leaves {row['host']} out; paceline doctor tests it"
    if len(hosts) == 1:
        hint = f"all ranks are on {row['host']}: test it with paceline doctor, and leave it out of the next job"
    error = CorruptionError(
        f"wrong bits in the audit of step {row['step']}, first in {row['tensor']}{others}",
        where=f"rank {row['rank']} on {row['host']}, {row['device']} ({row['name']})",
        got=got,
        hint=hint,
    )
    error.rank = row["rank"]
    return error


def _undecided(row: dict[str, Any], places: list[dict[str, Any]]) -> CorruptionError:
    where = ", ".join(f"rank {rank} on {places[rank]['host']} {places[rank]['device']}" for rank in row["suspects"])
    return CorruptionError(
        f"wrong bits in the audit of step {row['step']}, and the votes do not say whose",
        where=where,
        got="each computes the same again, and no majority of ranks agrees with one of them",
        hint="paceline doctor on each machine; four ranks can decide, two cannot",
    )
