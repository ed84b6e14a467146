"""What to do after a failure: which ones would repeat, and `decide`, a pure function of the failures so far."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.errors import (
    EXIT_CHECKPOINT,
    EXIT_CORRUPTION,
    EXIT_DATA,
    EXIT_NON_FINITE,
    EXIT_OWNER_LOST,
    EXIT_USER,
    Cause,
)
from paceline.runtime.this_rank import OWN_LAUNCHER

if TYPE_CHECKING:  # `paceline submit --help` must not wait for it
    from paceline.settings.schema import Config

# These would fail again in the same way.
FINAL_CAUSES = (
    *(Cause.USER_INPUT, Cause.USER_CODE, Cause.NOT_SHARED, Cause.DATA, Cause.CHECKPOINT, Cause.BAD_NUMBERS),
    Cause.OWNER_LOST,
)
# Their exit codes, and that of a machine that must be left out of the next job.
FINAL_CODES = (EXIT_USER, EXIT_DATA, EXIT_CHECKPOINT, EXIT_NON_FINITE, EXIT_OWNER_LOST, EXIT_CORRUPTION)
FINAL_CODE_FILE = "PACELINE_FINAL_CODE_FILE"  # set by job.sbatch
_MOST_AT_ONE_STEP = 3
_FAILURES_TO_SHRINK = 2
_LONGEST_PAUSE_S = 30.0


@dataclass(frozen=True)
class Failure:
    """One failed attempt, as far as it matters here."""

    cause: Cause
    rank: int
    step: int  # where it failed
    saved_step: int  # the newest checkpoint when it failed
    processes: int
    is_named: bool = True  # False: an audit cannot tell which rank is faulty


@dataclass(frozen=True)
class Decision:
    restart: bool
    reason: str  # why not, if not
    processes: int = 0
    pause_s: float = 0.0
    halve_microbatch: bool = False
    leave_out: bool = False  # the rank that failed


def decide(
    failures: list[Failure],
    *,
    max_restarts: int,
    worlds: list[int],
    auto_microbatch: bool,
    can_halve: bool,
    nodes: int = 1,
) -> Decision:
    """After the last of these failures. `worlds` are the numbers of ranks that are allowed, smallest first."""
    last = failures[-1]
    if last.cause in FINAL_CAUSES:
        return Decision(False, "it would fail again in the same way")
    if last.cause is Cause.OUT_OF_MEMORY and auto_microbatch and can_halve:
        return Decision(True, "", last.processes, 0.0, halve_microbatch=True)
    if last.cause is Cause.CORRUPTION and len(failures) <= max_restarts:
        return _after_corruption(failures, nodes)
    stuck = _failures_without_progress(failures)
    if len(stuck) >= _MOST_AT_ONE_STEP and len({failure.step for failure in stuck[-_MOST_AT_ONE_STEP:]}) == 1:
        return Decision(False, f"step {last.step} failed {_MOST_AT_ONE_STEP} times without progress")
    if len(failures) > max_restarts:
        return Decision(False, f"{max_restarts} restarts are used up" if max_restarts else "--max-restarts is 0")
    pause_s = 0.0 if len(stuck) == 1 else min(0.5 * 2.0 ** (len(stuck) - 1), _LONGEST_PAUSE_S)
    return Decision(True, "", _choose_world(stuck, worlds), pause_s)


def _after_corruption(failures: list[Failure], nodes: int) -> Decision:
    """Leave the faulty rank out, as long as there are others. Ranks of --exact are a power of two, so half remain."""
    last = failures[-1]
    if not last.is_named:
        return Decision(False, "it is not known which rank is faulty")
    if nodes > 1:
        return Decision(False, "the nodes of a job are fixed, and one of them computes wrong bits")
    if last.processes > 1:
        return Decision(True, "", last.processes // 2, leave_out=True)
    if sum(failure.cause is Cause.CORRUPTION and failure.processes == 1 for failure in failures) > 1:
        return Decision(False, "the only rank computed wrong bits twice")
    return Decision(True, "", 1)


def leave_out_gpu(visible: str | None, faulty: int, count: int) -> str:
    """CUDA_VISIBLE_DEVICES without the faulty one of `count` GPUs, which is numbered among those that were visible."""
    names = visible.split(",") if visible else [str(number) for number in range(count)]
    return ",".join(name for number, name in enumerate(names) if number != faulty)


def note_final_code(code: int) -> None:
    """Write the exit code of a failure that would repeat into the file that the job's script reads.

    `srun` ends the other tasks when one has failed, and then returns their signal instead of the first exit code. The
    script would requeue a job that has a user's mistake. A rank of our supervisor writes nothing: it may be restarted.
    """
    path = os.environ.get(FINAL_CODE_FILE)
    if path and code in FINAL_CODES and OWN_LAUNCHER not in os.environ:
        with suppress(OSError), Path(path).open("x") as file:  # the first process counts
            file.write(f"{code}\n")


def samples_to_cut(config: Config, ranks: int) -> int:
    """Samples of the part that is cut into microbatches: of a lane under --exact, else of a rank's share."""
    lanes = config.parallel.lanes or ranks
    return config.train.global_batch_size // (lanes if config.parallel.exact else ranks)


def fewest_microbatches(samples: int, largest: int) -> int:
    """The fewest equal parts of at most `largest` samples each. Unequal parts would need weights of their own."""
    return next(parts for parts in range(1, samples + 1) if samples % parts == 0 and samples // parts <= largest)


def _failures_without_progress(failures: list[Failure]) -> list[Failure]:
    """The last failures in a row that found the same newest checkpoint."""
    saved = failures[-1].saved_step
    count = next((n for n, failure in enumerate(reversed(failures)) if failure.saved_step != saved), len(failures))
    return failures[len(failures) - count :]


def _choose_world(stuck: list[Failure], worlds: list[int]) -> int:
    """As many ranks as allowed; fewer when the same rank keeps failing."""
    last = stuck[-1]
    same = [failure for failure in stuck if failure.rank == last.rank and failure.processes == last.processes]
    smaller = [size for size in worlds if size < last.processes]
    if len(same) >= _FAILURES_TO_SHRINK and smaller:
        return smaller[-1]
    if len(stuck) > 1:
        return last.processes
    return worlds[-1]
