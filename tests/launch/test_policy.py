"""The supervisor's decisions after failures."""

from __future__ import annotations

import errno

import pytest

from paceline.errors import Cause, EndsWithPrimary, PacelineError, UserError, error_from_json, error_kind
from paceline.launch.causes import cause_of, explain_error, explain_exit_code, is_consequence
from paceline.launch.policy import FINAL_CAUSES, FINAL_CODES, Decision, Failure, decide, leave_out_gpu


def after(*failures: Failure, max_restarts: int = 3, worlds: tuple[int, ...] = (2,), auto: bool = False) -> Decision:
    return decide(list(failures), max_restarts=max_restarts, worlds=list(worlds), auto_microbatch=auto, can_halve=True)


def failure(step: int, saved: int, *, rank: int = 0, cause: Cause = Cause.RANK_KILLED, processes: int = 2) -> Failure:
    return Failure(cause, rank, step, saved, processes)


def test_a_crash_is_restarted_at_once() -> None:
    assert after(failure(12, 10)) == Decision(True, "", 2, 0.0)


def test_an_error_that_would_repeat_is_not_restarted() -> None:
    for cause in Cause:
        assert after(failure(12, 10, cause=cause)).restart == (cause not in FINAL_CAUSES)


def test_exit_codes_and_causes_agree() -> None:
    """A scheduler decides by the exit code, the supervisor by the cause.

    Only a supervisor can leave a faulty rank out. A scheduler would start the job on the same machines.
    """
    for code in range(256):
        assert (code in FINAL_CODES) == (error_kind(code).cause in (*FINAL_CAUSES, Cause.CORRUPTION))


def corruption(processes: int, *, is_named: bool = True) -> Failure:
    return Failure(Cause.CORRUPTION, rank=0, step=12, saved_step=10, processes=processes, is_named=is_named)


def test_a_faulty_rank_is_left_out_until_one_is_left() -> None:
    assert after(corruption(4)) == Decision(True, "", 2, leave_out=True)
    assert after(corruption(4), corruption(2)) == Decision(True, "", 1, leave_out=True)
    assert after(corruption(1)) == Decision(True, "", 1)
    assert not after(corruption(1), corruption(1)).restart
    assert not after(corruption(4), max_restarts=0).restart
    assert not after(corruption(2, is_named=False)).restart
    on_nodes = decide([corruption(4)], max_restarts=3, worlds=[4], auto_microbatch=False, can_halve=True, nodes=2)
    assert not on_nodes.restart


def test_the_gpu_of_a_faulty_rank_is_not_visible_any_more() -> None:
    assert leave_out_gpu(None, 2, 4) == "0,1,3"
    assert leave_out_gpu("4,5,6,7", 0, 4) == "5,6,7"


def test_without_progress_pauses_grow() -> None:
    failures = [failure(step, 10) for step in (11, 12, 13, 14)]
    pauses = [after(*failures[:count], max_restarts=9).pause_s for count in (1, 2, 3, 4)]
    assert pauses == sorted(pauses)
    assert pauses[0] == 0.0 < pauses[1]
    assert after(*failures, failure(20, 15), max_restarts=9).pause_s == 0.0  # a new checkpoint is progress


def test_three_failures_at_one_step_end_the_run() -> None:
    assert after(*[failure(12, 10)] * 2, max_restarts=9).restart
    assert not after(*[failure(12, 10)] * 3, max_restarts=9).restart
    assert after(failure(12, 5), failure(12, 10), failure(12, 10), max_restarts=9).restart


def test_the_number_of_restarts_is_limited() -> None:
    progress = [failure(step, step - 1) for step in (10, 20, 30)]
    assert after(*progress, max_restarts=3).restart
    assert not after(*progress, max_restarts=2).restart
    assert not after(progress[0], max_restarts=0).restart


def test_the_world_size_shrinks_below_a_failing_rank_and_grows_back() -> None:
    once, twice = failure(12, 10, rank=3, processes=4), failure(13, 10, rank=3, processes=4)
    assert after(once, worlds=(1, 2, 4)).processes == 4
    assert after(once, twice, worlds=(1, 2, 4)).processes == 2
    assert after(once, twice, worlds=(4,)).processes == 4
    later = failure(40, 35, rank=0, processes=2)
    assert after(once, twice, later, worlds=(1, 2, 4), max_restarts=9).processes == 4


def test_out_of_memory_halves_the_microbatch_if_enabled() -> None:
    assert after(failure(12, 10, cause=Cause.OUT_OF_MEMORY), auto=True).halve_microbatch
    assert not after(failure(12, 10, cause=Cause.OUT_OF_MEMORY)).halve_microbatch


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), Cause.OUT_OF_MEMORY),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), Cause.OUT_OF_MEMORY),
        (MemoryError(), Cause.OUT_OF_MEMORY),
        (OSError(errno.ENOSPC, "translated text"), Cause.STORAGE),
        (RuntimeError("unable to write to file </torch_123> in /dev/shm"), Cause.SHARED_MEMORY),
        (RuntimeError("Address already in use"), Cause.PORT_TAKEN),
        (RuntimeError("Timed out waiting 10000ms for recv operation to complete"), Cause.TIMEOUT),
        (RuntimeError("Connection closed by peer [127.0.0.1]:20683"), Cause.PEER_LOST),
        (RuntimeError("[pair.cc:537] Read error: Connection reset by peer."), Cause.PEER_LOST),
        (OSError(errno.ECONNRESET, "translated text"), Cause.PEER_LOST),
    ],
)
def test_causes_of_errors_from_other_libraries(error: Exception, cause: Cause) -> None:
    assert cause_of(error) is cause
    assert explain_error(cause, fitted=8).hint
    assert is_consequence(error) == (cause is Cause.PEER_LOST)
    wrapped = ValueError("not known")
    wrapped.__cause__ = error
    assert cause_of(wrapped) is cause


def test_our_own_errors_have_their_cause() -> None:
    """No pattern reads the text of our own errors."""
    error = UserError("broken pipe, out of memory, address already in use")
    assert cause_of(error) is Cause.USER_INPUT
    lost = PacelineError("rank 1", cause=Cause.PEER_LOST)
    assert cause_of(error_from_json(lost.to_json())) is cause_of(lost) is Cause.PEER_LOST
    assert (cause_of(EndsWithPrimary(3, "screen")), is_consequence(EndsWithPrimary(3, ""))) == (Cause.DATA, True)
    assert cause_of(ValueError("bad label")) is Cause.INTERNAL
    assert not is_consequence(ValueError("bad label"))


@pytest.mark.parametrize(
    ("code", "memory_mb", "oom_kills", "cause"),
    [
        (-9, [], 0, Cause.RANK_KILLED),
        (-9, [300.0, 900.0, 4000.0], 0, Cause.OUT_OF_MEMORY),
        (-9, [], 1, Cause.OUT_OF_MEMORY),
        (-7, [], 0, Cause.SHARED_MEMORY),
        (-11, [], 0, Cause.RANK_CRASHED),
        (0, [], 0, Cause.RANK_EXITED),
    ],
)
def test_causes_of_ranks_without_an_exit_record(
    code: int, memory_mb: list[float], oom_kills: int, cause: Cause
) -> None:
    found = explain_exit_code(code, memory_mb=memory_mb, fitted=8, oom_kills=oom_kills)
    assert found.cause is cause
    assert found.hint
