"""The live line at any width, wrapped lines, and the stream of each message. See also tests/cli/test_terminal.py."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from contextlib import redirect_stdout

import pytest

from paceline.metrics.console import Console, Field, fit, has_brief_line
from paceline.metrics.screen import LiveLine, ScreenLog, fold, is_live, paint
from paceline.runs.epoch_clock import EpochClock

VALUES = {
    **{"loss": 1.23456, "accuracy": 0.567, "lr": 0.0125, "throughput": 36123.0, "data_wait": 0.2},
    **{"memory_mb": 41234.0, "memory_peak_mb": 51234.0, "grad_norm": 1.25},
}


class FakeTerminal(io.StringIO):
    """Records what is written, with the escape sequences."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> FakeTerminal:
    for name in ("CI", "NO_COLOR", "PACELINE_OUTPUT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return FakeTerminal()


def live_console() -> Console:
    console = Console(is_enabled=True, clock=EpochClock(195), epochs=100)
    console._total_steps, console._step, console._values = 19500, 1234, VALUES
    return console


def test_on_a_fake_terminal_of_any_width_the_line_fits(terminal: FakeTerminal) -> None:
    with redirect_stdout(terminal):
        console = live_console()
        lines = {width: console._compose(width) for width in range(1, 250)}
    for width, painted in lines.items():
        line = re.sub(r"\x1b\[\d+m", "", painted)
        assert len(line) <= width
        if width > 12:
            assert "step 1234/19500"[:width] in line, "the last field that is dropped"


def test_a_fake_terminal_of_eighty_columns_shows_all_important_fields(terminal: FakeTerminal) -> None:
    console = live_console()
    console._total_steps, console._step, console._epochs = 1950, 234, 10
    console._values = {**VALUES, "memory_mb": 412.0, "throughput": 3105.0}
    with redirect_stdout(terminal):
        line, wide = console._compose(79), console._compose(199)
    for part in ("epoch 2/10", "step 234/1950", "loss 1.235", "acc 56.7%", "3,105 img/s", "eta 0:00", "412 MB"):
        assert part in line
    assert "lr 0.0125" not in line
    assert all(part in wide for part in ("loss 1.2346", "mem 412 MB", "lr 0.0125", "data wait 20%", "━", "─"))


def test_the_last_step_of_an_epoch_counts_for_that_epoch() -> None:
    console = Console(is_enabled=False, clock=EpochClock(9), epochs=2)
    assert [console._epoch_of(step) for step in (0, 1, 9, 10, 18)] == [1, 1, 1, 2, 2]


def test_fields_are_shortened_and_then_dropped_by_priority() -> None:
    fields = [Field("alpha 1", "a 1", 2), Field("beta 2", "b 2", 1)]
    shown = {15: "alpha 1  beta 2", 14: "a 1  b 2", 8: "a 1  b 2", 7: "alpha 1", 3: "a 1", 2: "a "}
    assert {width: fit(fields, width) for width in shown} == shown


def test_wrapped_lines_are_indented_and_paths_are_not_broken() -> None:
    six = "word word word word word word"
    assert fold(f"data      {six} {six}", 40) == f"data      {six}\n          {six}"
    assert fold("  where:   rank 1 on a node far away", 25) == "  where:   rank 1 on a\n           node far away"
    path = "runs/" + "x" * 60
    assert path in fold(f"resumed   at step 3 from {path}", 40)
    assert fold("short", 40) == "short"


@pytest.mark.parametrize("variable", [("CI", "true"), ("TERM", "dumb"), ("PACELINE_OUTPUT", "quiet")])
def test_plain_lines_if_the_output_is_no_terminal(
    variable: tuple[str, str], terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(*variable)
    with redirect_stdout(terminal):
        console = Console(is_enabled=True, clock=EpochClock(9), epochs=2)
        console.start(first_step=0, total_steps=18)
        console.step(9, 18, VALUES)
        console.epoch(1, 9, {**VALUES, "seconds": 1.0}, VALUES, True)
        console.stop()
    reported = terminal.getvalue()
    assert "\x1b" not in reported
    if variable[1] == "quiet":
        assert reported == ""
    else:
        assert reported.startswith(
            "step 9/18  epoch 1/2  loss 1.2346  acc 56.7%  lr 0.0125  36,123 img/s  wait 20%  mem "
        )
        assert "*best" in reported.splitlines()[1]


def test_brief_output_has_no_steps_and_about_ten_epochs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PACELINE_OUTPUT=brief, for the logs of other programs' tasks. The last epoch is always there."""
    monkeypatch.setenv("PACELINE_OUTPUT", "brief")
    reported = {
        epochs: [epoch for epoch in range(1, epochs + 1) if has_brief_line(epoch, epochs)] for epochs in range(1, 400)
    }
    assert all(epochs in lines and len(lines) <= 11 for epochs, lines in reported.items())
    assert reported[10] == list(range(1, 11))
    console = Console(is_enabled=True, clock=EpochClock(9), epochs=100)
    console.start(first_step=0, total_steps=900)
    for epoch in range(1, 101):
        console.step(9 * epoch, 900, VALUES)
        console.epoch(epoch, 9 * epoch, {**VALUES, "seconds": 1.0}, VALUES, False)
    console.stop()
    assert [int(line[6:9]) for line in capsys.readouterr().out.splitlines()] == reported[100]


def test_no_color_keeps_the_live_line_of_a_fake_terminal(
    terminal: FakeTerminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert paint("x", "green", terminal) == "\x1b[32mx\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert paint("x", "green", terminal) == "x"
    assert is_live(terminal)


def test_messages_are_printed_above_the_live_line_of_a_fake_terminal(terminal: FakeTerminal) -> None:
    log = logging.getLogger("paceline-test-above")
    log.propagate = False
    log.addHandler(ScreenLog())
    line = LiveLine(terminal)
    with redirect_stdout(terminal):
        line.start(lambda width: "LIVE")
        print("hello", end=" ")
        print("world")
        log.warning("warning: slow")
        sys.stdout.write("no end")
        line.stop()
        assert sys.stdout is terminal
    live = "\r\x1b[J\x1b[?7lLIVE\x1b[?7h\r"
    warning = "\x1b[33mwarning: slow\x1b[0m\n"
    erase = "\r\x1b[J"
    assert terminal.getvalue() == f"{live}{erase}hello world\n{live}{erase}{warning}{live}{erase}no end\n{erase}"


def test_a_fake_terminal_without_unicode(terminal: FakeTerminal) -> None:
    terminal.encoding = "latin-1"
    with redirect_stdout(terminal):
        console = live_console()
        console.epoch(1, 9, {**VALUES, "seconds": 1.0}, VALUES, True)
        console._compose(200).encode("latin-1")
    terminal.getvalue().encode("latin-1")
    assert "* best" in terminal.getvalue()


def test_rows_of_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_OUTPUT", "json")
    console = Console(is_enabled=True, clock=EpochClock(9), epochs=2)
    console.note("paceline  header")
    console.epoch(2, 18, {**VALUES, "seconds": 1.0}, VALUES, False)
    captured = capsys.readouterr()
    row = json.loads(captured.out)
    assert (row["kind"], row["epoch"], row["step"], row["is_best"]) == ("epoch", 2, 18, False)
    assert row["val"]["accuracy"] == 0.567
    assert "paceline  header" in captured.err


def test_only_the_primary_prints(capsys: pytest.CaptureFixture[str]) -> None:
    console = Console(is_enabled=False, clock=EpochClock(9), epochs=2)
    console.note("x")
    console.epoch(1, 9, {**VALUES, "seconds": 1.0}, VALUES, True)
    assert capsys.readouterr().out == ""
