"""What the supervisor decides after failures."""

from __future__ import annotations

from paceline.launch.causes import is_peer_loss, name_cause
from paceline.launch.policy import Decision, Failure, decide


def after(*failures: Failure, max_restarts: int = 3, worlds: tuple[int, ...] = (2,), auto: bool = False) -> Decision:
    return decide(list(failures), max_restarts=max_restarts, worlds=list(worlds), auto_microbatch=auto, can_halve=True)


def failure(step: int, saved: int, *, rank: int = 0, code: int = 70, processes: int = 2, oom: bool = False) -> Failure:
    return Failure(code, rank, step, saved, processes, oom)


def test_a_crash_is_worth_another_try_at_once() -> None:
    assert after(failure(12, 10)) == Decision(True, "", 2, 0.0)


def test_what_would_fail_again_is_not_tried() -> None:
    for code in (2, 3, 4, 5):
        assert not after(failure(12, 10, code=code)).restart


def test_without_progress_pauses_grow() -> None:
    failures = [failure(step, 10) for step in (11, 12, 13, 14)]
    pauses = [after(*failures[:count], max_restarts=9).pause_s for count in (1, 2, 3, 4)]
    assert pauses == sorted(pauses)
    assert pauses[0] == 0.0 < pauses[1]
    assert after(*failures, failure(20, 15), max_restarts=9).pause_s == 0.0  # a new checkpoint is progress


def test_one_step_three_times_is_the_end() -> None:
    assert after(*[failure(12, 10)] * 2, max_restarts=9).restart
    assert not after(*[failure(12, 10)] * 3, max_restarts=9).restart
    assert after(failure(12, 5), failure(12, 10), failure(12, 10), max_restarts=9).restart


def test_restarts_run_out() -> None:
    progress = [failure(step, step - 1) for step in (10, 20, 30)]
    assert after(*progress, max_restarts=3).restart
    assert not after(*progress, max_restarts=2).restart
    assert not after(progress[0], max_restarts=0).restart


def test_the_world_shrinks_below_a_rank_that_keeps_failing_and_grows_back() -> None:
    once, twice = failure(12, 10, rank=3, processes=4), failure(13, 10, rank=3, processes=4)
    assert after(once, worlds=(1, 2, 4)).processes == 4
    assert after(once, twice, worlds=(1, 2, 4)).processes == 2
    assert after(once, twice, worlds=(4,)).processes == 4
    later = failure(40, 35, rank=0, processes=2)
    assert after(once, twice, later, worlds=(1, 2, 4), max_restarts=9).processes == 4


def test_out_of_memory_halves_the_microbatch_if_asked_to() -> None:
    assert after(failure(12, 10, oom=True), auto=True).halve_microbatch
    assert not after(failure(12, 10, oom=True)).halve_microbatch


def test_known_causes_have_a_hint() -> None:
    def cause(text: str, code: int | None = 70, memory: tuple[float, ...] = (), oom_kills: int = 0) -> str | None:
        found = name_cause(text, code, memory_mb=list(memory), fitted=8, oom_kills=oom_kills, is_hung=False)
        assert found is None or found.hint
        return found.name if found else None

    assert cause("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB") == "out-of-memory"
    assert cause("RuntimeError: DefaultCPUAllocator: can't allocate memory") == "out-of-memory"
    assert cause("OSError: [Errno 28] No space left on device") == "disk-full"
    assert cause("RuntimeError: unable to write to file </torch_123> in /dev/shm") == "shared-memory"
    assert cause("RuntimeError: Address already in use") == "port-taken"
    assert cause("RuntimeError: Timed out waiting 10000ms for recv operation to complete") == "timeout"
    assert cause("RuntimeError: Connection closed by peer [127.0.0.1]:20683") == "peer-lost"
    assert cause("", -9) == "killed"
    assert cause("", -9, (300.0, 900.0, 4000.0)) == "oom-killed"
    assert cause("", -9, oom_kills=1) == "oom-killed"
    assert cause("", -7) == "shared-memory"
    assert cause("", -11) == "crashed"
    assert cause("ValueError: something new") is None


def test_a_lost_peer_is_never_the_first_cause() -> None:
    assert is_peer_loss("RuntimeError: [pair.cc:537] Read error: Connection reset by peer.")
    assert not is_peer_loss("ValueError: bad label")
