"""`paceline logs`: the logs of a run's ranks, or of its job."""

from __future__ import annotations

import codecs
import re
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO

from paceline.cli.command import Command
from paceline.cli.run_view import RunName, describe_place, look
from paceline.errors import EXIT_FINISHED, UserError, printable
from paceline.integrations.kubernetes.client import cluster_of
from paceline.integrations.kubernetes.logs import choose_pod, follow_log, read_log
from paceline.launch.job_record import JobRecord, read_record
from paceline.runs.catalog import find_run
from paceline.runs.folder import RunFolder
from paceline.settings.declare import Arg, Range
from paceline.settings.values import Setting, invalid

_POLL_S = 0.5
_POLL_EVERY_S = 15.0  # each status asks the scheduler, which serves others too
_CHUNK_BYTES = 1 << 16
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def parse_rank(text: str, setting: Setting) -> str:
    if text != "all" and not (text.isascii() and text.isdecimal()):
        raise invalid(setting, text, "a whole number, or all")
    return text


@dataclass(frozen=True)
class Logs:
    """Show the log of rank 0, of another rank, or of all ranks one after the other."""

    run: RunName
    """A run folder, its name in runs/, or the id or name of its Slurm job."""
    rank: Annotated[str | None, Arg("N|all", parse=parse_rank)] = None
    """The rank (0 unless given)."""
    job: bool = False
    """The output of the Slurm job, or of all pods of a Kubernetes job, also replaced ones: it has what happened before
    the ranks started. It is also shown if a run has no other log yet, or none that can be seen from here (then of pod
    0, or of a pod that is left)."""
    lines: Annotated[int | None, Range(low=0)] = None
    """Only the last N lines."""
    follow: bool = False
    """Continue until the run has ended. Ctrl-C does not stop the run."""


def logs(settings: Logs) -> int:
    folder = find_run(settings.run)
    record = read_record(folder.path)
    if record is not None and record.scheduler == "kubernetes" and (settings.job or not _ranks(folder)):
        return _print_pods(folder, record, settings)
    paths = _choose(folder, settings)
    if not any(path.exists() and path.stat().st_size for path in paths):
        _remark_nothing_written(folder)
    if not settings.follow:
        for path in paths:
            _print_end(path, settings.lines, with_name=len(paths) > 1)
        return EXIT_FINISHED
    if len(paths) > 1:
        raise UserError("one log can be followed at a time", got="--rank all --follow", hint="--rank 0 --follow")
    try:
        _follow(folder, paths[0], settings.lines)
    except KeyboardInterrupt:
        print(f"\nno longer followed; {folder.path} continues", file=sys.stderr)
    return EXIT_FINISHED


def _remark_nothing_written(folder: RunFolder) -> None:
    _remark(f"nothing was written so far: {describe_place(folder)}")


def _print_pods(folder: RunFolder, record: JobRecord, settings: Logs) -> int:
    """From the cluster: pod 0 prints for the run, or all pods one after the other."""
    if settings.rank is not None:
        raise UserError(
            "the logs of ranks are in the run folder, which only the cluster sees",
            got=f"--rank {settings.rank}",
            hint="leave --rank out for pod 0, which prints for all; --job for every pod",
        )
    try:
        if settings.follow:
            _write_out(follow_log(record, settings.lines, _remark))
        else:
            has_text = _print_pod_logs(record, settings.lines, is_for_all=settings.job)
            if not has_text and settings.lines != 0:
                _remark_nothing_written(folder)
    except KeyboardInterrupt:
        print(f"\nno longer followed; {record.job_id} continues", file=sys.stderr)
    return EXIT_FINISHED


def _print_pod_logs(record: JobRecord, last_lines: int | None, *, is_for_all: bool) -> bool:
    """Whether there was anything to print."""
    cluster = cluster_of(record)
    pods = cluster.read_pods(record.job_id)
    chosen = choose_pod(pods, f"{cluster.namespace}/{record.job_id}")
    if not is_for_all:
        if chosen.index:
            _remark(f"pod 0 was deleted; this is the log of pod {chosen.index} ({chosen.name})")
        return _write_out(read_log(cluster, chosen, record.api, last_lines))
    with_log = sorted((pod for pod in pods if pod.has_log), key=lambda pod: pod.index)
    indexes, has_text = [pod.index for pod in with_log], False
    for pod in with_log:
        if len(with_log) > 1:
            # A pod that was replaced has a log of its own, under its name.
            name = f": {pod.name}" if indexes.count(pod.index) > 1 else ""
            code = f", exit code {pod.exit_code}" if name and pod.exit_code is not None else ""
            print(f"==> pod {pod.index}{name}{code} <==", flush=True)
        has_text |= _write_out(read_log(cluster, pod, record.api, last_lines))
    return has_text


def _write_out(chunks: Iterator[bytes]) -> bool:
    """Whether there was anything to write."""
    output, has_text = _Output(), False
    for chunk in chunks:
        output.write(chunk)
        has_text |= bool(chunk)
    return has_text


def _remark(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _ranks(folder: RunFolder) -> dict[int, Path]:
    return {int(path.stem[5:]): path for path in folder.logs.glob("rank-*.log") if path.stem[5:].isdecimal()}


def _choose(folder: RunFolder, settings: Logs) -> list[Path]:
    ranks = _ranks(folder)
    jobs = sorted(folder.logs.glob("slurm-*.log"), key=lambda path: path.stat().st_mtime)
    if settings.job:
        if settings.rank is not None:
            raise UserError("one log or the other", got="--job with --rank", hint="leave one out")
        return [_require(jobs, folder)]
    if settings.rank == "all":
        return [ranks[rank] for rank in sorted(ranks)] or [_require(jobs, folder)]
    rank = int(settings.rank or 0)
    if settings.rank is not None and rank in ranks:
        return [ranks[rank]]
    if settings.rank is not None and ranks:
        raise UserError(f"there is no log of rank {rank}", where=str(folder.logs), allowed=f"0 to {max(ranks)}, or all")
    if settings.follow:
        return [folder.log_of(rank)]  # it will be written
    return [ranks[0]] if 0 in ranks else [_require(jobs, folder)]


def _require(jobs: list[Path], folder: RunFolder) -> Path:
    if not jobs:
        hint = f"paceline status {shlex.quote(str(folder.path))}"
        raise UserError("there is no log yet", where=str(folder.logs), got=describe_place(folder), hint=hint)
    return jobs[-1]


def _print_end(path: Path, last_lines: int | None, *, with_name: bool) -> None:
    if with_name:
        print(f"==> {path.name} <==", flush=True)
    output = _Output()
    with path.open("rb") as file:
        for chunk in _end_of(file, last_lines):
            output.write(chunk)


def _end_of(file: BinaryIO, last_lines: int | None) -> Iterator[bytes]:
    """From the last so many lines on, read from the end: logs of long runs are long."""
    if last_lines is not None:
        position, tail = file.seek(0, 2), b""
        while position > 0 and tail.count(b"\n") <= last_lines:
            step = min(_CHUNK_BYTES, position)
            position = file.seek(position - step)
            tail = file.read(step) + tail
        yield b"".join(tail.splitlines(keepends=True)[-last_lines:] if last_lines else [])
        file.seek(0, 2)
    while chunk := file.read(_CHUNK_BYTES):
        yield chunk


class _Output:
    """A log on standard output: text without control characters. A log holds whatever a program has written."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="backslashreplace")  # a chunk may end anywhere

    def write(self, chunk: bytes) -> None:
        text = self._decoder.decode(chunk)
        # Colours are dropped. A progress bar that returns to the start of its line becomes lines.
        text = _COLOURS.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
        sys.stdout.write(printable(text))
        sys.stdout.flush()


def _follow(folder: RunFolder, path: Path, last_lines: int | None) -> None:
    file: BinaryIO | None = None
    output = _Output()
    next_look_s = 0.0
    try:
        while True:
            # Ask for the end of the run before the last read: nothing is written after the end.
            is_over = False
            if time.monotonic() >= next_look_s or folder.read_status().get("status") == "finished":
                is_over = look(folder).is_over
                next_look_s = time.monotonic() + _POLL_EVERY_S
            if file is None and path.exists():
                file = path.open("rb")
                for chunk in _end_of(file, last_lines):
                    output.write(chunk)
            elif file is not None:
                for chunk in _end_of(file, None):
                    output.write(chunk)
            if is_over:
                return
            time.sleep(_POLL_S)
    finally:
        if file is not None:
            file.close()


COMMANDS = (Command("logs", Logs, logs),)
