"""The first failure of an attempt: one screen for a person, failure.json for programs."""

from __future__ import annotations

import json
import re
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from paceline.errors import EXIT_HANG, EXIT_INTERNAL, Cause, UserError
from paceline.launch.attempt import AttemptEnd
from paceline.launch.causes import Explanation, explain_error, explain_exit_code
from paceline.launch.watch import RankState
from paceline.runs.folder import ATTEMPT_MARK, RunFolder, write_json
from paceline.settings.faults import read_ledger
from paceline.settings.small_files import write_plain

_LOG_LINES = 5
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')


@dataclass
class FailureReport:
    """Which rank, where, why, what the others did, and what was done about it."""

    attempt: int
    attempts: int
    rank: int
    host: str
    step: int
    phase: str
    exit_code: int
    what: str
    cause: Cause
    hint: str | None
    kind: str
    traceback: str
    screen: str  # of an error that explains itself
    error: dict[str, Any] | None  # the same in parts
    stands_at: str | None  # the line of code at which a hung rank waits
    log: list[str]
    others: dict[int, str]
    done: str = ""
    is_named: bool = True  # False: an audit cannot tell which rank is faulty
    is_restarted: bool = False
    lost_steps: int = 0
    time: str = field(default_factory=lambda: datetime.now().astimezone().isoformat(timespec="milliseconds"))

    def text(self, *, with_traceback: bool = False) -> str:
        lines = [f"attempt {self.attempt} of {self.attempts} failed: {self.what}"]
        parts: list[tuple[str, str | None]] = [
            ("where", f"rank {self.rank} on {self.host}, {self.phase} of step {self.step}"),
            ("line", self.stands_at),
            ("others", "\n".join(f"rank {rank}: {doing}" for rank, doing in self.others.items()) or None),
            ("log", "\n".join(self.log[-3:]) or None),
            ("trace", self.traceback.strip() or None if with_traceback else None),
            ("done", self.done or None),
            ("try", self.hint),
        ]
        for label, value in parts:
            if value is not None:
                lines.append(f"  {label + ':':<8} " + value.replace("\n", "\n" + " " * 11))
        return "\n".join(lines)

    def write(self, folder: RunFolder) -> None:
        """The newest failure, and a line for each of the run."""
        content: dict[str, Any] = asdict(self)
        # If the disk has failed, only the screen shows the report.
        with suppress(OSError, UserError):
            write_json(folder.failure, content)
            write_plain(folder.failures, (json.dumps(content) + "\n").encode(), appends=True)


def report_failure(end: AttemptEnd, folder: RunFolder, *, attempt: int, attempts: int, oom_kills: int) -> FailureReport:
    stacks_of = partial(folder.stacks_of, attempt)
    culprit = _find_culprit(end, stacks_of)
    beat, record = culprit.beat, culprit.exit
    code = end.exit_codes.get(culprit.rank)
    stands_at = None
    if end.hung:
        stands_at = _line_of(stacks_of(culprit.rank))
        stacks = "" if folder.is_temporary else f"every rank's stack is in {folder.stacks}; "
        found = Explanation(Cause.HANG, hint=f"{stacks}--hang-timeout-s sets the deadline")
    else:
        found = _explain(culprit, code, oom_kills)
        if found.cause in (Cause.RANK_KILLED, Cause.RANK_EXITED):
            found = _injected(folder.faults, attempt, culprit.rank, found.cause) or found
        if found.cause is Cause.INTERNAL and not folder.is_temporary:
            found = replace(found, hint=found.hint or f"{folder.failure} has the traceback")
    return FailureReport(
        attempt=attempt,
        attempts=attempts,
        rank=culprit.rank,
        host=socket.gethostname(),
        step=beat.step if beat else 0,
        phase=beat.phase if beat else "start",
        exit_code=EXIT_HANG if end.hung else record.exit_code if record else EXIT_INTERNAL,
        what=_describe_end(culprit, code, is_hung=bool(end.hung)) + (f": {found.what}" if found.what else ""),
        cause=found.cause,
        hint=found.hint,
        kind=record.kind if record else "",
        traceback=record.traceback if record else "",
        screen=record.screen if record else "",
        error=record.error if record else None,
        stands_at=stands_at,
        log=_last_lines(folder.log_of(culprit.rank)),
        is_named=found.cause is not Cause.CORRUPTION or _named_by_audit(list(end.ranks.values())) is not None,
        others={state.rank: _doing(state) for state in end.ranks.values() if state.rank != culprit.rank},
    )


def _explain(culprit: RankState, code: int | None, oom_kills: int) -> Explanation:
    fitted = culprit.beat.fitted if culprit.beat else 0
    if culprit.exit is None:
        return explain_exit_code(code, memory_mb=list(culprit.memory_mb), fitted=fitted, oom_kills=oom_kills)
    found = explain_error(culprit.exit.cause, fitted=fitted)
    own_hint = culprit.exit.error["hint"] if culprit.exit.error else None
    return replace(found, hint=own_hint or found.hint)


def _injected(ledger: Path, attempt: int, rank: int, cause: Cause) -> Explanation | None:
    """If `--inject` has killed this rank or let it exit."""
    injected = [row for row in read_ledger(ledger) if (row["attempt"], row["rank"]) == (attempt, rank)]
    if not injected or injected[-1].get("kind") not in ("kill", "exit"):
        return None
    return Explanation(cause, f"--inject has requested it: {injected[-1].get('what', '')}")


def _find_culprit(end: AttemptEnd, stacks_of: Callable[[int], Path]) -> RankState:
    """The rank behind the failure: hung and behind the others; else without an exit record; else the first to fail."""
    ranks = list(end.ranks.values())
    if end.hung:
        behind = min(state.beat.place for state in ranks if state.beat)
        candidates = [state for state in ranks if state.beat and state.beat.place == behind]
        # Of several in one place, those that wait for others are inside a collective.
        alone = [state for state in candidates if not _is_waiting(stacks_of(state.rank))]
        return (alone or candidates)[0]
    named = _named_by_audit(ranks)
    if named in end.ranks:
        return end.ranks[named]
    silent = [state for state in ranks if state.exit is None and not state.was_ended_by_us]
    lost = [state for state in silent if state.is_lost or end.exit_codes.get(state.rank) != 0]
    if lost:
        return lost[0]
    records = sorted((state.exit.time_s, state.rank) for state in ranks if state.exit is not None)
    failed = [end.ranks[rank] for _, rank in records]
    first = [state for state in failed if state.exit is not None and not state.exit.is_consequence]
    return (first or failed or ranks)[0]


def _named_by_audit(ranks: list[RankState]) -> int | None:
    """The faulty rank in the error of an audit, which all ranks raise."""
    errors = [state.exit.error for state in ranks if state.exit is not None and state.exit.error is not None]
    return next((error["rank"] for error in errors if error.get("rank") is not None), None)


def _describe_end(state: RankState, code: int | None, *, is_hung: bool) -> str:
    if is_hung:
        return f"rank {state.rank} made no progress for {_age(state):.0f} s"
    if state.exit is not None:
        what = state.exit.what.splitlines()[0][:200] if state.exit.what else "no message"
        kind = f"{state.exit.kind}: " if state.exit.kind and not state.exit.kind.endswith("Error") else ""
        return f"rank {state.rank} ended with {kind}{what}"
    if code is not None and code < 0:
        return f"rank {state.rank} was ended by {signal.Signals(-code).name}"
    return f"rank {state.rank} exited with code {code}"


def _doing(state: RankState) -> str:
    if state.beat is None:
        return "had not started yet"
    return f"{state.beat.phase} of step {state.beat.step}, for {_age(state):.1f} s"


def _age(state: RankState) -> float:
    return max(0.0, state.seen_at_s - state.beat.since_s) if state.beat else 0.0


def _main_stack(path: Path) -> list[str]:
    """The frames of the main thread, innermost first; the dump lists it last."""
    try:
        blocks = path.read_text().split("\n\n")
    except OSError:
        return []
    stacks = [[line.strip() for line in block.splitlines() if "File " in line] for block in blocks]
    return next((stack for stack in reversed(stacks) if stack), [])


def _line_of(path: Path) -> str | None:
    """The innermost line of our own or the user's code, else the innermost at all."""
    stack = _main_stack(path)
    own = [line for line in stack if "site-packages" not in line and "/lib/python" not in line]
    match = _FRAME.search((own or stack or [""])[0])
    return f"{match['file']}:{match['line']} in {match['function']}" if match else None


def _is_waiting(path: Path) -> bool:
    innermost = " ".join(_main_stack(path)[:4])
    return "torch/distributed" in innermost or "torch/autograd" in innermost


def _last_lines(path: Path) -> list[str]:
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError:
        return []
    starts = [number for number, line in enumerate(lines) if f"INFO {ATTEMPT_MARK} " in line]
    return lines[(starts[-1] + 1 if starts else 0) :][-_LOG_LINES:]
