"""Which steps `--audit` checks, and who recomputes what: pure functions of seed and step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import torch

from paceline.data.draws import start_of
from paceline.data.loader import LaneAudit
from paceline.errors import UserError
from paceline.metrics.ceiling import name_processor
from paceline.parallel.collectives import gather_texts
from paceline.runtime.detect import World
from paceline.settings.audit import parse_audit
from paceline.settings.schema import Config

_STEP, _PAIR, _LANE = 23, 24, 25  # keep these draws apart from others
NO_MAJORITY = 2  # ranks


def audited_steps(first: int, end: int, *, seed: int, share: float) -> Iterator[int]:
    """The audited steps from `first` to before `end`, counted from 0.

    Time is cut into blocks of 1 / share steps, and each block has one audit at a random place. Two audits are
    therefore less than two blocks apart. Independent draws would leave gaps of any length.
    """
    if share <= 0:
        return
    found = -1
    for block in range(max(math.floor(first * share) - 1, 0), math.floor(end * share) + 2):
        step = _step_of_block(block, seed, share)
        if first <= step < end and step > found:  # shares above a half may draw a step twice
            found = step
            yield step


@cache
def _step_of_block(block: int, seed: int, share: float) -> int:
    place = (start_of(_STEP, seed, block) % 2**64) / 2**64
    # Rounded to whole numbers where a block ends, so that 1 / share does not move it.
    return min(math.floor((block + place) / share), math.ceil((block + 1) / share) - 1)


def plan_audits(config: Config, world: World, lanes_per_rank: int, steps: range) -> dict[int, LaneAudit]:
    """What this rank recomputes, by the step of the epoch. `steps`: of the whole run, of this epoch."""
    share, seed = parse_audit(config.guard.audit), config.train.seed
    return {
        step - steps.start: LaneAudit(
            rank=(world.rank + _distance(seed, step, world.world_size)) % world.world_size,
            lane=start_of(_LANE, seed, step) % lanes_per_rank,
        )
        for step in audited_steps(steps.start, steps.stop, seed=seed, share=share)
    }


def _distance(seed: int, step: int, world_size: int) -> int:
    """From each rank to the one whose lane it recomputes: a ring. 0 on one rank."""
    return 1 + start_of(_PAIR, seed, step) % (world_size - 1) if world_size > 1 else 0


def require_alike(config: Config, world: World) -> None:
    """Refuse processors of different kinds: they give different bits, and none of them is faulty. Collective."""
    if not parse_audit(config.guard.audit) or world.world_size == 1:
        return
    names = gather_texts(f"{name_device(world)} ({world.host})", world)
    kinds = {name.rpartition(" (")[0] for name in names}
    if len(kinds) > 1:
        raise UserError(
            "audit compares bits, and processors of different kinds compute different bits",
            where="flag --audit",
            got="\n".join(dict.fromkeys(names)),
            hint="nodes of one kind (Slurm: --constraint), or leave --audit out",
        )


def describe_audit(config: Config, world: World) -> str | None:
    """A line of the header, with what an audit on so few ranks cannot do."""
    if not parse_audit(config.guard.audit):
        return None
    text = f"{config.guard.audit} of the steps"
    if world.world_size == 1:
        return f"{text}, computed twice; in each epoch a short training whose weights are known, too"
    if world.world_size == NO_MAJORITY:
        return f"{text}, recomputed on the other rank; with two ranks a lasting fault is found, but not whose it is"
    return f"{text}, recomputed on another rank"


def name_device(world: World) -> str:
    return torch.cuda.get_device_name(world.device) if world.device.startswith("cuda") else name_processor()
