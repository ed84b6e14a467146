"""Machines without a C compiler: steps are not compiled, and one line says so."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from harness.cli import paceline
from harness.runs import read_results
from paceline.training.compiling import has_compiler

FLAGS = ["--num-samples=64", "--global-batch-size=32", "--epochs=1", "--hidden-size=8", "--processes=2", "--track"]


def test_without_a_compiler_the_steps_are_not_compiled_and_one_line_says_so(tmp_path: Path) -> None:
    """Even with --compile always: the run ends with the weights of --compile never."""
    bare = {"PATH": str(Path(sys.executable).parent), "CC": "", "CXX": ""}
    shown = []
    for choice in ("always", "never"):
        flags = [*FLAGS, f"--compile={choice}", f"--output-dir={choice}"]
        answer = paceline("train", "synthetic-mlp", *flags, cwd=tmp_path, env=bare)
        assert answer.code == 0, answer
        shown.append(answer.out.count("steps are not compiled"))
    assert shown == [1, 0]
    always, never = (read_results(tmp_path / choice)["weights_sha256"] for choice in ("always", "never"))
    assert always == never


@pytest.mark.parametrize(
    ("device", "program", "variables", "found"),
    [
        ("cuda:0", "gcc", {}, True),
        ("cuda:0", "clang", {}, True),
        ("cuda:0", "g++", {}, False),
        ("cuda:0", "gcc", {"CC": "icx -O1"}, False),
        ("cuda:0", "icx", {"CC": "icx -O1"}, True),
        ("cpu", "g++", {}, True),
        ("cpu", "gcc", {}, False),
        ("cpu", "clang++", {"CXX": "clang++"}, True),
    ],
)
def test_the_compiler_of_each_device_is_searched(
    device: str, program: str, variables: dict[str, str], found: bool, tmp_path: Path
) -> None:
    """Triton uses CC, gcc or clang. torch on CPUs uses CXX or g++."""
    file = tmp_path / program
    file.write_text("#!/bin/sh\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    assert has_compiler(device, {"PATH": str(tmp_path), **variables}) is found
