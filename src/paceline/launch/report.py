"""The first failure of an attempt: one screen for a person, failure.json for programs."""

from __future__ import annotations

import json
import re
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from paceline.errors import EXIT_HANG, EXIT_INTERNAL, EndsWithPrimary, UserError
from paceline.launch.attempt import AttemptEnd
from paceline.launch.causes import Cause, is_peer_loss, name_cause
from paceline.launch.rank_exit import RankExit
from paceline.launch.watch import RankSight
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
    cause: str | None
    hint: str | None
    kind: str
    traceback: str
    screen: str  # of an error that explains itself
    error: dict[str, Any] | None  # the same in parts
    stands_at: str | None  # the line a hung rank stands on
    log: list[str]
    others: dict[int, str]
    done: str = ""
    lost_steps: int = 0
    time: str = field(default_factory=lambda: datetime.now().astimezone().isoformat(timespec="milliseconds"))

    def text(self, *, with_traceback: bool = False) -> str:
        lines = [f"attempt {self.attempt} of {self.attempts} failed: {self.what}"]
        parts: list[tuple[str, str | None]] = [
            ("where", f"rank {self.rank} on {self.host}, {self.phase} of step {self.step}"),
            ("line", self.stands_at),
            ("others", "\n".join(f"rank {rank}: {words}" for rank, words in self.others.items()) or None),
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
        # A disk that is full or gone may be the failure: then the screen has to do.
        with suppress(OSError, UserError):
            write_json(folder.failure, content)
            write_plain(folder.failures, (json.dumps(content) + "\n").encode(), appends=True)


def report_failure(end: AttemptEnd, folder: RunFolder, *, attempt: int, attempts: int, oom_kills: int) -> FailureReport:
    stacks_of = partial(folder.stacks_of, attempt)
    culprit = _find_culprit(end, stacks_of)
    beat, words = culprit.beat, culprit.words
    is_hung = bool(end.hung)
    code = end.exit_codes.get(culprit.rank)
    text = f"{words.kind}: {words.what}\n{words.traceback}" if words else ""
    cause = name_cause(
        text,
        code,
        memory_mb=list(culprit.memory_mb),
        fitted=beat.fitted if beat else 0,
        oom_kills=oom_kills,
        is_hung=is_hung,
    )
    if cause is not None and cause.name in ("killed", "exited"):
        cause = _injected(folder.faults, attempt, culprit.rank) or cause
    stands_at = _line_of(stacks_of(culprit.rank)) if is_hung else None
    if is_hung:
        what = f"rank {culprit.rank} made no progress for {_age(culprit):.0f} s"
        stacks = "" if folder.is_temporary else f"every rank's stack is in {folder.stacks}; "
        hint: str | None = f"{stacks}--hang-timeout-s sets the deadline"
    else:
        what = _in_words(culprit, code) + (f": {cause.words}" if cause else "")
        hint = cause.hint if cause else None if folder.is_temporary else f"{folder.failure} has the traceback"
    return FailureReport(
        attempt=attempt,
        attempts=attempts,
        rank=culprit.rank,
        host=socket.gethostname(),
        step=beat.step if beat else 0,
        phase=beat.phase if beat else "start",
        exit_code=EXIT_HANG if is_hung else words.exit_code if words else EXIT_INTERNAL,
        what=what,
        cause="hang" if is_hung else cause.name if cause else None,
        hint=hint,
        kind=words.kind if words else "",
        traceback=words.traceback if words else "",
        screen=words.screen if words else "",
        error=words.error if words else None,
        stands_at=stands_at,
        log=_last_lines(folder.log_of(culprit.rank)),
        others={sight.rank: _doing(sight) for sight in end.ranks.values() if sight.rank != culprit.rank},
    )


def _injected(ledger: Path, attempt: int, rank: int) -> Cause | None:
    """A rank that a rehearsed fault has ended."""
    struck = [row for row in read_ledger(ledger) if (row.get("attempt"), row.get("rank")) == (attempt, rank)]
    what = str(struck[-1].get("what", "")) if struck else ""
    names = {"kill": "killed", "exit": "exited"}
    name = names.get(what.partition(" ")[0])
    return Cause(name, f"--inject has asked for it: {what}") if name else None


def _find_culprit(end: AttemptEnd, stacks_of: Callable[[int], Path]) -> RankSight:
    """The rank behind the failure: hung and behind all others; else gone without a word; else first to speak."""
    ranks = list(end.ranks.values())
    if end.hung:
        behind = min(sight.beat.place for sight in ranks if sight.beat)
        candidates = [sight for sight in ranks if sight.beat and sight.beat.place == behind]
        # Of several in one place, those that wait for others stand inside a collective.
        alone = [sight for sight in candidates if not _is_waiting(stacks_of(sight.rank))]
        return (alone or candidates)[0]
    silent = [sight for sight in ranks if sight.words is None and not sight.was_ended_by_us]
    speechless = [sight for sight in silent if sight.is_lost or end.exit_codes.get(sight.rank) != 0]
    if speechless:
        return speechless[0]
    speakers = sorted((s for s in ranks if s.words is not None), key=lambda s: s.words.said_at_s if s.words else 0.0)
    causes = [s for s in speakers if s.words and not _is_consequence(s.words)]
    return (causes or speakers or ranks)[0]


def _is_consequence(words: RankExit) -> bool:
    return words.kind == EndsWithPrimary.__name__ or is_peer_loss(f"{words.what}\n{words.traceback}")


def _in_words(sight: RankSight, code: int | None) -> str:
    if sight.words is not None:
        what = sight.words.what.splitlines()[0][:200] if sight.words.what else "no message"
        kind = f"{sight.words.kind}: " if sight.words.kind and not sight.words.kind.endswith("Error") else ""
        return f"rank {sight.rank} ended with {kind}{what}"
    if code is not None and code < 0:
        return f"rank {sight.rank} was ended by {signal.Signals(-code).name}"
    return f"rank {sight.rank} ended without a word (exit code {code})"


def _doing(sight: RankSight) -> str:
    if sight.beat is None:
        return "had not started yet"
    return f"{sight.beat.phase} of step {sight.beat.step}, for {_age(sight):.1f} s"


def _age(sight: RankSight) -> float:
    return max(0.0, sight.seen_at_s - sight.beat.since_s) if sight.beat else 0.0


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
