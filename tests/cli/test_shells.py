"""The completion scripts in a real bash, zsh and fish."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from harness.cli import environment
from harness.made_runs import make_run

pytestmark = pytest.mark.terminal


@pytest.fixture
def home(home: Path) -> Path:
    make_run(home / "runs" / "one")
    make_run(home / "runs" / "two words")
    return home


def ask(shell: list[str], program: str, home: Path) -> list[str]:
    if shutil.which(shell[0]) is None and not os.environ.get("PACELINE_REQUIRE_TERMINAL"):
        pytest.skip(f"no {shell[0]} here")
    surroundings = environment(PATH=f"{home / 'bin'}:/usr/bin:/bin", HOME=str(home))
    done = subprocess.run(
        [*shell, "-c", program],
        cwd=home,
        env=surroundings,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_in_bash(home: Path) -> None:
    program = (
        'eval "$(paceline completion bash)"\n'
        'at() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _paceline; printf "%s\\n" "${COMPREPLY[@]}"; }\n'
        "at paceline tra; at paceline train --strategy f; at paceline status runs/t; complete -p paceline"
    )
    wanted = ["train", "fsdp", "runs/two\\ words", "complete -o default -F _paceline paceline"]
    assert ask(["bash", "--norc", "--noprofile"], program, home) == wanted


def test_in_fish(home: Path) -> None:
    program = (
        "paceline completion fish | source\n"
        "complete -C 'paceline tra'; complete -C 'paceline train --strategy f'; complete -C 'paceline status runs/'\n"
        "complete -C 'paceline predict runs/one bi'"
    )
    assert ask(["fish", "--no-config"], program, home) == ["train", "fsdp", "runs/one", "runs/two words", "bin/"]


def test_in_zsh(home: Path) -> None:
    # Without its line editor zsh completes nothing: the test calls the function, with a fake compadd.
    program = (
        "autoload -Uz compinit && compinit -u -D\n"
        'eval "$(paceline completion zsh)"\n'
        "compadd() { print -rl -- ${(P)2} }\n"
        "_files() { print files }\n"
        'at() { words=("$@"); CURRENT=$#; _paceline }\n'
        "at paceline tra; at paceline train --strategy f; at paceline status runs/t; at paceline predict runs/one ''\n"
        "print $_comps[paceline]"
    )
    assert ask(["zsh", "-f"], program, home) == ["train", "fsdp", "runs/two words", "files", "_paceline"]
