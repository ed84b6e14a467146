"""Lines of a pod's log: each is shown once, also if a stream breaks or if many lines have the same time."""

from __future__ import annotations

from paceline.integrations.kubernetes.logs import _new_line, _Position

EARLY, LATE = b"2026-11-15T10:00:00.5Z", b"2026-11-15T10:00:01Z"


def read(position: _Position, *lines: bytes) -> list[bytes]:
    """The lines of one stream."""
    position.begin_stream()
    return [shown for line in lines if (shown := _new_line(line, position)) is not None]


def test_lines_with_the_same_time_are_all_shown() -> None:
    """CRI-O gives all lines of one write the same time."""
    position = _Position("pod")
    assert read(position, EARLY + b" a", EARLY + b" b", LATE + b" c", LATE + b" d") == [b"a\n", b"b\n", b"c\n", b"d\n"]


def test_a_reopened_stream_shows_only_new_lines() -> None:
    position = _Position("pod")
    read(position, EARLY + b" a", LATE + b" b", LATE + b" c")
    again = read(position, EARLY + b" a", LATE + b" b", LATE + b" c", LATE + b" d")
    assert again == [b"d\n"]
    assert read(position, LATE + b" b", LATE + b" c", LATE + b" d") == []


def test_lines_without_times_are_shown_unchanged() -> None:
    assert read(_Position("pod"), b"plain words") == [b"plain words\n"]
