"""The streams of a run: for any fault of the console, a write neither raises nor blocks forever."""

from __future__ import annotations

import fcntl
import os
import pty
import time
from pathlib import Path

import pytest

from paceline.metrics import safe_output
from paceline.metrics.safe_output import SafeStream


@pytest.fixture
def small_pipe() -> tuple[int, int]:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    return reader, writer


def test_a_closed_pipe_redirects_all_output_to_the_log(tmp_path: Path, small_pipe: tuple[int, int]) -> None:
    """After EPIPE all output is in the log, including that of native code."""
    reader, writer = small_pipe
    stream = SafeStream(writer, "utf-8")
    stream.keep_in(tmp_path / "log", "paceline cancel run")
    stream.write("first\n")
    assert os.read(reader, 100) == b"first\n"
    os.close(reader)
    stream.write("second\n")
    os.write(writer, b"native\n")
    print("third", file=stream)
    text = (tmp_path / "log").read_text()
    assert [text.index(word) for word in ("cancel run", "second", "native", "third")] == sorted(
        text.index(word) for word in ("cancel run", "second", "native", "third")
    )
    assert stream.loss == os.strerror(32)
    assert not stream.isatty()
    os.close(writer)


def test_output_before_the_log_was_opened_is_in_the_log(tmp_path: Path, small_pipe: tuple[int, int]) -> None:
    """If the console is lost during the start, no line is lost."""
    reader, writer = small_pipe
    os.close(reader)
    stream = SafeStream(writer, "utf-8")
    stream.write("early\n")
    stream.keep_in(tmp_path / "log", "")
    stream.write("late\n")
    assert (tmp_path / "log").read_text().splitlines()[1:] == ["early", "late"]
    os.close(writer)


def test_a_closed_terminal_is_a_lost_console(tmp_path: Path) -> None:
    """EIO from a terminal whose other end is closed."""
    master, slave = pty.openpty()
    stream = SafeStream(slave, "utf-8")
    stream.keep_in(tmp_path / "log", "")
    assert stream.isatty()
    stream.write("on the screen\n")
    os.close(master)
    stream.write("in the log\n")
    assert (tmp_path / "log").read_text().splitlines()[1:] == ["in the log"]
    assert not stream.isatty()
    os.close(slave)


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_a_reader_that_stops_causes_one_wait_and_gets_all_lines_later(
    kind: str, tmp_path: Path, small_pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A blocked console causes one pause, not one per line, and no line is lost."""
    monkeypatch.setattr(safe_output, "_PATIENCE_S", 0.2)
    reader, writer = small_pipe if kind == "pipe" else pty.openpty()
    stream = SafeStream(writer, "utf-8")
    began = time.monotonic()
    lines = [f"line {number:06} {'x' * 80}" for number in range(2000)]
    for line in lines:
        print(line, file=stream, flush=True)
    assert stream.is_slow
    assert time.monotonic() - began < 5
    seen = b""
    while seen.count(b"\n") < len(lines):
        seen += os.read(reader, 65536)
        stream.flush()
    assert seen.decode().replace("\r", "").splitlines() == lines
    assert not stream.is_slow
    os.close(writer)
    os.close(reader)


def test_output_beyond_the_memory_limit_is_in_the_log(
    tmp_path: Path, small_pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory for a slow console is limited. The rest goes to the log, and the console says how much."""
    monkeypatch.setattr(safe_output, "_PATIENCE_S", 0.01)
    monkeypatch.setattr(safe_output, "_MOST_WAITING_BYTES", 10_000)
    reader, writer = small_pipe
    stream = SafeStream(writer, "utf-8")
    stream.keep_in(tmp_path / "log", "")
    lines = [f"line {number:06}" for number in range(5000)]
    for line in lines:
        print(line, file=stream)
    seen = b""
    while b"note:" not in seen:
        seen += os.read(reader, 65536)
        stream.flush()
    shown = [line for line in seen.decode().splitlines() if line.startswith("line")]
    logged = (tmp_path / "log").read_text().splitlines()
    assert sorted([*shown, *logged]) == lines
    os.close(reader)
    os.close(writer)


def test_a_full_disk_does_not_end_the_console(tmp_path: Path) -> None:
    """ENOSPC is temporary. Lines that could not be written are in the log."""
    descriptor = os.open("/dev/full", os.O_WRONLY)
    stream = SafeStream(descriptor, "utf-8")
    stream.keep_in(tmp_path / "log", "")
    stream.write("no room\n")
    assert stream.loss is None
    assert (tmp_path / "log").read_text() == "no room\n"
    with (tmp_path / "console").open("wb") as file:
        os.dup2(file.fileno(), descriptor)
    stream.write("room\n")
    assert (tmp_path / "console").read_text().splitlines()[0] == "room"
    os.close(descriptor)


def test_characters_that_the_console_cannot_encode_are_escaped(tmp_path: Path) -> None:
    """An ASCII locale, and a file name that is not UTF-8."""
    with (tmp_path / "console").open("wb") as file:
        stream = SafeStream(file.fileno(), "ascii")
        stream.write("b\u00e4r \udcff\n")
    assert (tmp_path / "console").read_bytes() == b"b\\xe4r \\udcff\n"


def test_a_descriptor_that_was_closed_before_the_start(tmp_path: Path) -> None:
    """`>&-`: the next file that is opened must not get this descriptor."""
    reader, writer = os.pipe()
    os.close(reader)
    os.close(writer)
    stream = SafeStream(writer, "utf-8")
    stream.write("no process reads this\n")
    assert stream.loss is not None
    assert os.path.samestat(os.fstat(writer), Path(os.devnull).stat())
    os.close(writer)
