"""`paceline` in a real terminal, wide and narrow: the screen during a run, after a resize and an interrupt."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.made_runs import elsewhere, hold, make_run
from harness.tmux import Terminal

pytestmark = pytest.mark.terminal

OpenTerminal = Callable[..., Terminal]
TRAIN = "paceline train --global-batch-size=32 --log-frequency=1 --track --omp-num-threads=1"
LONG = f"{TRAIN} --num-samples=6400 --epochs=3 --processes=2"
SHORT = f"{TRAIN} --num-samples=320 --epochs=2 --processes=1"
LIVE = r"^epoch \d/3  step \d+/540  loss \d"
HEADER = ["paceline", "model", "data", "augment", "batch", "steps", "folder"]


def labels(screen: str) -> list[str]:
    """The first words of the header's lines."""
    return [match[1] for match in re.finditer(r"^(\w+) {2,}\S", screen, re.MULTILINE)]


def test_narrow_wide_and_ctrl_c(open_terminal: OpenTerminal, home: Path) -> None:
    terminal = open_terminal(80)
    terminal.type(LONG)
    screen = terminal.wait_for(LIVE)
    assert labels(screen) == HEADER
    assert max(map(len, screen.splitlines())) <= 80
    narrow = terminal.wait_for(rf"{LIVE}.*acc .*img/s.*eta \S+").splitlines()[-1]
    assert len(narrow) < 80
    assert terminal.cursor() == (0, True)  # visible: a killed process could not show it again

    terminal.resize(200)
    wide = terminal.wait_for(rf"{LIVE}.*lr \S+.*[━─]").splitlines()[-1]
    assert 80 < len(wide) < 200
    terminal.resize(60)
    terminal.wait_for(lambda screen: 20 < len(screen.splitlines()[-1]) < 60)
    # The terminal wraps the line, and the next line removes it: one live line after every resize.
    assert len(re.findall(LIVE, terminal.screen(), re.MULTILINE)) == 1
    assert len(re.findall("━", terminal.screen())) <= 30

    terminal.press("C-c")
    screen = terminal.wait_for_prompt()
    assert not re.search(LIVE, screen, re.MULTILINE), "no live line remains"
    assert "^C" not in screen
    folded = " ".join(screen.split())
    assert "stopping and saving; Ctrl-C again stops at once" in folded
    assert re.search(
        r"stopped at step \d+ and saved \(interrupted by the user\); continue with: paceline train runs/", folded
    )
    terminal.type("echo code $?")
    terminal.wait_for("^code 130$")
    (folder,) = (home / "runs").iterdir()
    assert json.loads((folder / "status.json").read_text())["status"] == "stopped"


@pytest.mark.timeout(300)
def test_ctrl_z_and_fg(open_terminal: OpenTerminal, home: Path) -> None:
    """Suspended for longer than --hang-timeout-s, a run continues after `fg`, without a restart."""
    terminal = open_terminal(120)
    terminal.type(
        f"{TRAIN} --num-samples=1600 --epochs=3 --processes=2 --hang-timeout-s 15 --max-restarts 0 --output-dir run"
    )
    terminal.wait_for(r"^epoch 1/3  step \d+/\d+  loss \d")
    terminal.press("C-z")
    terminal.wait_for("Stopped")
    step = json.loads((home / "run" / "status.json").read_text())["step"]
    time.sleep(18)  # the suspension: longer than the deadline
    assert json.loads((home / "run" / "status.json").read_text())["step"] <= step + 1, "every rank is suspended"
    terminal.type("fg")
    terminal.wait_for("everything is in run", 200)
    terminal.type("clear; echo code $?")
    terminal.wait_for("^code 0$")
    assert not (home / "run" / "failures.jsonl").exists()


def test_a_restart_and_a_warning_are_above_the_live_line(open_terminal: OpenTerminal, home: Path) -> None:
    terminal = open_terminal(160)
    fault = "--inject 'kill rank=0 step=12; nan rank=0 step=4' --skip-nonfinite 1"
    # Save before the next step: in the background, step 10 may be missing at step 12.
    terminal.type(f"{SHORT} --processes=2 {fault} --save-steps 5 --no-async-save --output-dir run")
    screen = terminal.wait_for_prompt()
    rows = screen.splitlines()
    assert max(map(len, rows)) <= 160
    order = [
        *(r"warning: .* step 4", r" +1/2 .*best", r"attempt 1 of 4 failed: rank 0 was ended by SIGKILL"),
        *(r"  done:    started again from step 10", r"paceline  continues on 2 ranks", r"resumed   at step 10 from"),
        *(r" +2/2 ", r"test accuracy", r"everything is in run"),
        *(r"  paceline predict run PICTURE", r"  paceline export run --format safetensors", r"  paceline runs "),
    ]
    found = [next((n for n, row in enumerate(rows) if re.match(pattern, row)), -1) for pattern in order]
    assert -1 not in found, (order[found.index(-1)], screen)
    assert found == sorted(found)
    assert not any(row.startswith("step ") or re.match(r"epoch \d/2  step", row) for row in rows)
    assert not re.search("[━─]", screen), "the live line of the killed rank is removed"
    assert len([row for row in rows if row.startswith("  paceline ")]) == 3


def test_plain_lines_if_the_output_is_read_by_a_program(open_terminal: OpenTerminal, home: Path) -> None:
    terminal = open_terminal(200, CI="true")
    terminal.type(SHORT)
    screen = terminal.wait_for_prompt()
    assert len(re.findall(r"^step \d+/18  epoch \d/2  loss ", screen, re.MULTILINE)) == 18
    assert len(re.findall(r"^epoch \d/2  train loss ", screen, re.MULTILINE)) == 2
    assert "\x1b" not in terminal.screen(colours=True)


def test_no_color_and_a_pipe(open_terminal: OpenTerminal, home: Path) -> None:
    terminal = open_terminal(100, NO_COLOR="1")
    terminal.type(f"{SHORT} --output-dir one")
    terminal.wait_for(r"^epoch \d/2  step ")
    screen = terminal.wait_for_prompt()
    assert "★ best" in screen
    assert "\x1b" not in terminal.screen(colours=True)
    terminal.type("clear; paceline runs --in . | cat")
    assert "one   shapes-cnn  finished" in terminal.wait_for("finished")


def test_tables_and_watching_in_a_narrow_window(open_terminal: OpenTerminal, home: Path) -> None:
    for number in range(3):
        folder = make_run(home / "runs" / f"a-rather-long-name-of-a-run-{number}", step=7, accuracies=(0.5,), age_s=60)
        folder.failures.write_text('{"done": "started again from step 5"}\n')
    running = make_run(home / "runs" / "far-away", "running", step=30, last_step=120, eta_s=90.0)
    hold(running, elsewhere())
    terminal = open_terminal(60)
    terminal.type("clear; paceline runs")
    screen = terminal.wait_for_prompt()
    assert max(map(len, screen.splitlines())) < 60
    assert re.search(r"a-rather-long-name-of-a-run-2 +finished", screen)
    assert re.search(r"far-away +running", screen)
    terminal.type("clear; paceline watch far-away --every-s 0.2")
    terminal.wait_for(r"far-away: running, step 30 of 120 \(25%\)")
    running.write_status("running", step=60, last_step=120)
    terminal.wait_for(r"step 60 of 120 \(50%\)")
    running.write_status("finished", step=120, test_accuracy=0.5)
    screen = terminal.wait_for_prompt()
    assert screen.count("far-away: ") == 1, "in place"
    assert "runs/far-away: finished, step 120 of 120 (100%)" in screen


def test_clean_asks(open_terminal: OpenTerminal, home: Path) -> None:
    make_run(home / "runs" / "one", "failed")
    terminal = open_terminal(80)
    for answer, is_there in (("n", True), ("y", False)):
        terminal.type("clear; paceline clean --failed --all")
        terminal.wait_for(r"Remove 1 whole run\? \[y/N\]")
        terminal.type(answer)
        terminal.wait_for_prompt()
        assert (home / "runs" / "one").exists() == is_there


def test_tab(open_terminal: OpenTerminal, home: Path) -> None:
    terminal = open_terminal(100)
    terminal.type('eval "$(paceline completion bash)"; clear')
    terminal.type("paceline tra", enter=False)
    terminal.press("Tab")
    terminal.wait_for("paceline train ?$")
    terminal.type("sha", enter=False)
    terminal.press("Tab")
    terminal.wait_for("paceline train shapes-cnn ?$")
