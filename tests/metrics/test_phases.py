"""The phases of a step, with a clock that the test advances."""

from __future__ import annotations

import pytest
import torch

from paceline.metrics import phases as phases_module
from paceline.metrics.phases import WARMUP_STEPS, PhaseClock
from paceline.parallel import exposed as exposed_module
from paceline.parallel.exposed import Exposed


class HandClock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    hand = HandClock()
    monkeypatch.setattr(phases_module, "time", hand)
    monkeypatch.setattr(exposed_module, "time", hand)
    return hand


def take_step(phases: PhaseClock, clock: HandClock, unit_s: float) -> None:
    """1 of data, 2 of forward, 4 of backward with a wait of 1, 1 of update, 0.5 of the rest, in units."""
    for phase, length in (("data", 1.0), ("forward", 2.0), ("backward", 4.0), ("update", 1.0), ("other", 0.5)):
        phases.enter(phase)
        clock.now += length * unit_s
        if phase == "backward":
            phases.waited(unit_s, 100)


def test_phases_are_separate_and_add_up_without_the_first_steps(clock: HandClock) -> None:
    phases = PhaseClock()
    for _ in range(WARMUP_STEPS):
        take_step(phases, clock, 64.0)
    for _ in range(4):
        take_step(phases, clock, 1.0)
        phases.enter("evaluate")  # between steps: counts for no step
        clock.now += 1000.0
    shown = phases.summary()
    assert shown["steps"] == 4
    assert shown["step_ms"] == {"mean": 8500.0, "p50": 8500.0, "p95": 8500.0}
    assert shown["breakdown_ms"] == {
        **{"data": 1000.0, "forward": 2000.0, "backward": 3000.0, "communication": 1000.0},
        **{"update": 1000.0, "other": 500.0},
    }
    assert shown["communicated_bytes_per_step"] == 100


def test_a_run_without_steps_has_no_phases() -> None:
    assert PhaseClock().summary() == {}


def test_fake_gpu_marks_are_read_a_step_later_and_none_is_lost(
    clock: HandClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, waits = 0, []

    class Event:
        """Records its own time, and the number of complete steps until it was awaited."""

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at, self.step = clock.now, ended

        def synchronize(self) -> None:
            waits.append((self.step, ended))

        def elapsed_time(self, end: Event) -> float:
            return 1000 * (end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    phases = PhaseClock("cuda:0")
    for number in range(17):  # the steps 0, 8 and 16 are marked
        phases.enter("data")
        ended = number
        for phase, length in (("forward", 2.0), ("update", 1.0), ("other", 0.5)):
            phases.enter(phase)
            clock.now += length if number != 16 else 10 * length
    shown = phases.summary()
    # Step 8 is part of the warm-up. The last step is read at the end, when no step waits for it.
    assert waits == [(0, 1), (8, 9), (16, 16)]
    assert shown["steps"] == 7
    assert shown["breakdown_ms"]["forward"] == 20_000
    assert shown["breakdown_ms"]["update"] == 10_000


def test_asynchronous_work_does_not_count_as_a_wait(clock: HandClock) -> None:
    exposed = Exposed(torch.device("cpu"))
    clock.now = 3.0
    exposed.exchanged(1.0, 10)
    assert exposed.take() == (2.0, 10)
    exposed.is_known = False  # as for shards on a GPU
    exposed.exchanged(1.0, 10)
    assert exposed.take() == (0.0, 10)
