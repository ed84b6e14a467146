"""Draws steps of a run at random, replays them from the nearest checkpoints, and compares what the run has recorded."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoints.ledger import Entry
from paceline.checkpoints.payload import PayloadReader
from paceline.checkpoints.store import Checkpoint, open_checkpoint
from paceline.data.order import samples_of
from paceline.metrics.step_trace import UNKNOWN, Numbers, read_trace
from paceline.runs.folder import RunFolder
from paceline.settings.samples import excluded_ids
from paceline.tools.trust.findings import Findings
from paceline.tools.trust.stored import check_use_of_samples, first_start
from paceline.training.receipt import order_link
from paceline.training.replay import Replay

KINDS = ("model", "optimizer", "ema")  # of tensors that one rank has as many ranks have
_DRAW = random.SystemRandom()  # the writer of a receipt cannot know which steps are checked
# Without equal bits, differences of rounding grow from step to step: an honest run leaves any tolerance after a while.
_COMPARABLE_STEPS = 10  # after each start


@dataclass(frozen=True)
class Draw:
    """How many steps are drawn, how many may be replayed for them, and what counts as equal on another machine."""

    steps: int
    at_most: int  # steps to replay; 0: no limit
    tolerance: float  # relative
    say: Callable[[str], None] = lambda text: None


@dataclass(frozen=True)
class Stretch:
    """Steps to replay, one after the other: after `start` up to `end`."""

    start: int
    end: int

    def __len__(self) -> int:
        return self.end - self.start


def choose_stretches(total: int, starts: list[int], saved: list[int], draw: Draw) -> list[Stretch]:
    """Draw steps, and add to each stretch the steps to the next saved checkpoint: its hash proves all of them.

    With a limit, steps are drawn near the starts, and a stretch may end before the checkpoint.
    """
    share = draw.at_most // len(starts) if draw.at_most else total
    ends = [*starts[1:], total]
    reachable = [range(start + 1, min(end, start + max(share, 1)) + 1) for start, end in zip(starts, ends, strict=True)]
    count = sum(map(len, reachable))  # ranges: a hostile receipt may name any number of steps
    places = _DRAW.sample(range(count), min(draw.steps, count))
    stretches, first = [], 0
    for start, part in zip(starts, reachable, strict=True):
        drawn = [part[place - first] for place in places if first <= place < first + len(part)]
        first += len(part)
        if drawn:
            end = next((step for step in saved if step >= max(drawn)), max(drawn))
            stretches.append(Stretch(start, min(end, part[-1])))
    return stretches


def replay_draw(
    replay: Replay, sound: list[Checkpoint], links: dict[str, Any], draw: Draw, reasons: list[str], findings: Findings
) -> int:
    """Replay some steps and add what was found. Returns how many steps were replayed and agree.

    `sound`: the stored checkpoints that are what the receipt says.
    """
    total = int(links["results"]["steps"] or 0)
    entries: dict[int, Entry] = {int(entry["step"]): entry for entry in links["checkpoints"]}
    trace = read_trace(RunFolder(replay.run).steps)
    earliest = first_start(links)
    starts = [step for step in (0, *replay.stored) if earliest <= step < total]
    if not starts:
        findings.add("not proved", "steps", f"no checkpoint is stored after step {earliest}, where the data changed")
        return 0
    if reasons:
        limit = _COMPARABLE_STEPS * len(starts)
        draw = replace(draw, at_most=min(draw.at_most or limit, limit))
    stretches = choose_stretches(total, starts, sorted(entries), draw)
    if not stretches:
        findings.add("not proved", "steps", "none was replayed")
        return 0
    replay.start_at(starts[-1])  # earlier steps of a resumed run may have had other settings, such as max_steps
    if not check_use_of_samples(replay, sound, links, findings):
        return 0
    if not _check_plan(replay, links["order"], total, findings):
        return 0
    checker = _Checker(replay, trace, entries, None if not reasons else draw.tolerance)
    planned = sum(map(len, stretches))
    for stretch in stretches:
        draw.say(f"replaying steps {stretch.start + 1} to {stretch.end} ({planned} of {total} steps in all)")
        replay.start_at(stretch.start)
        if not replay.has_batches_of_run:
            text = "BatchNorm of several ranks without --exact: one rank repeats it only for 2, 4, 8, ... ranks"
            findings.add("not proved", "steps", f"they cannot be replayed: {text}")
            return checker.agreed
        fault = checker.check(stretch)
        if fault:
            findings.add("different", "steps", fault)
            return checker.agreed
    _add_summary(checker, total, reasons, draw, findings)
    return checker.agreed


def _check_plan(replay: Replay, recorded_order: dict[str, Any], total: int, findings: Findings) -> bool:
    """Order, excluded samples and number of steps, by the last settings. Returns whether steps can be replayed."""
    plan = replay.components.plan
    order = order_link(replay.components.train_data, plan)
    findings.compare("order", recorded_order, order, "the samples, and their order in the first and last epoch")
    _check_excluded(replay, findings)
    if total > plan.last_step:
        findings.add("different", "steps", f"{total} in the receipt, but its settings give {plan.last_step}")
    elif total < plan.last_step:
        text = f"why the run ended at step {total}: its settings give {plan.last_step} steps"
        findings.add("not proved", "steps", text)
    return total <= plan.last_step


def _check_excluded(replay: Replay, findings: Findings) -> None:
    """No batch of any epoch holds an excluded sample."""
    plan, data = replay.components.plan, replay.components.train_data
    excluded = torch.tensor(excluded_ids(plan.config.data.exclude), dtype=torch.int64)
    if not len(excluded):
        return
    train = plan.config.train
    for epoch in range(train.epochs):
        batches = samples_of(data.global_batches(train.seed, epoch, train.global_batch_size)).cpu()
        if bool(torch.isin(batches, excluded).any()):
            findings.add("different", "exclude", f"epoch {epoch + 1} uses an excluded sample")
            return
    text = f"by its settings, none of the {len(excluded)} excluded samples is in a batch of the {train.epochs} epochs"
    findings.add("proved", "exclude", text)


def _add_summary(checker: _Checker, total: int, reasons: list[str], draw: Draw, findings: Findings) -> None:
    text = f"{checker.agreed} of {total} replayed on one rank: loss and gradient norm of each"
    text += f", and the weights of {checker.weights} checkpoints" if checker.weights else ""
    how = f"within {draw.tolerance:g} of the recorded values" if reasons else "bit for bit"
    findings.add("proved", "steps", f"{text}, {how}")
    for reason in reasons:
        findings.add("not proved", "steps", f"bit for bit: {reason}")
    if checker.unknown:
        findings.add("not proved", "steps", f"{checker.unknown} replayed steps have no recorded loss and gradient norm")
    if checker.left_out:
        text = f"{checker.left_out} replayed steps were left out by the run: it is not checked why"
        findings.add("not proved", "steps", text)
    if checker.agreed < total:
        why = f"only {_COMPARABLE_STEPS} after each checkpoint are comparable" if reasons else "--steps N draws more"
        findings.add("not proved", "steps", f"{total - checker.agreed} steps were not replayed ({why})")


class _Checker:
    """Compares replayed steps with the record."""

    def __init__(
        self, replay: Replay, trace: list[Numbers], entries: dict[int, Entry], tolerance: float | None
    ) -> None:
        """`tolerance`: None to compare bits."""
        self._replay = replay
        self._trace = trace
        self._entries = entries
        self._tolerance = tolerance
        self.agreed = 0  # steps
        self.weights = 0  # checkpoints
        self.unknown = 0  # steps without a record
        self.left_out = 0  # steps that changed nothing
        self._waiting = 0  # steps without a record since the last checkpoint: its weights prove them

    def check(self, stretch: Stretch) -> str:
        """Replay a stretch. Returns the first difference, or nothing."""
        self._waiting = 0
        for step in self._replay.steps(stretch.end):
            self.left_out += step.is_left_out
            recorded = self._trace[step.step - 1] if step.step <= len(self._trace) else UNKNOWN
            if recorded == UNKNOWN:
                self.unknown += 1
                self._waiting += 1
            else:
                names, now = ("loss", "gradient norm"), (step.loss, step.grad_norm)
                for name, then, here in zip(names, recorded, now, strict=True):
                    if not self._is_same(then, here):
                        return f"step {step.step}: {name} {then!r} is recorded, the replay gives {here!r}"
                self.agreed += 1
            if step.step in self._entries and (fault := self._check_weights(step.step)):
                return f"step {step.step}: {fault}"
        return ""

    def _is_same(self, then: float, here: float) -> bool:
        if math.isnan(then) or math.isnan(here):
            return math.isnan(then) and math.isnan(here)
        if self._tolerance is None:
            return then == here
        return math.isclose(then, here, rel_tol=self._tolerance, abs_tol=self._tolerance * 1e-3)

    def _check_weights(self, step: int) -> str:
        if self._tolerance is not None:
            return self._compare_stored(step)
        recorded, now = self._entries[step]["tensors"], self._replay.hashes()
        other = [kind for kind in KINDS if recorded.get(kind) != now.get(kind)]
        if other:
            return f"the replay gives other bits in {', '.join(other)} than the checkpoint of the run"
        self._count_weights()
        return ""

    def _count_weights(self) -> None:
        self.weights += 1
        self.agreed, self._waiting = self.agreed + self._waiting, 0

    def _compare_stored(self, step: int) -> str:
        """Within the tolerance: the distance of the weights, relative to their length."""
        assert self._tolerance is not None
        if step not in self._replay.stored:
            return ""
        checkpoint = open_checkpoint(self._replay.stored[step])
        reader = PayloadReader(checkpoint.path, checkpoint.files_of("model"))
        here = {name: value for name, value in self._replay.weights().items() if value.is_floating_point()}
        apart, length = 0.0, 0.0
        for name, value in here.items():
            then: Tensor = reader.read(name).double()
            apart += float((then - value.double()).square().sum())
            length += float(then.square().sum())
        if apart**0.5 > self._tolerance * max(length**0.5, 1e-12):
            return f"the weights are {apart**0.5 / max(length**0.5, 1e-12):.2g} away from those of the checkpoint"
        self._count_weights()
        return ""
