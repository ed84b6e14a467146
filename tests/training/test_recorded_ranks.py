"""Steps of several ranks on a GPU: recorded with their exchange, and exact. Run with `pytest -m gpu`; CI has none.

One GPU stands for several: a group of one rank records real collectives of NCCL, and `--ranks-per-gpu` runs 2 and 4
ranks that exchange through gloo.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.runs import read_results, step_losses

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]
QUICK = ["--num-samples=2560", "--epochs=2", "--global-batch-size=256", "--log-frequency=1", "--track"]
EXACT = ("--exact", "--lanes=4", "--model-name=resnet18")


def start(folder: Path, *flags: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """A command of its own: NCCL's group of one would stay in this process."""
    arguments = [sys.executable, "-m", "paceline", "train", "shapes-cnn", *QUICK, "--output-dir", str(folder), *flags]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, env={**os.environ})
    assert done.returncode == code, done.stdout + done.stderr
    return done


def train(folder: Path, *flags: str) -> dict[str, Any]:
    start(folder, *flags)
    return read_results(folder)


def is_recorded(results: dict[str, Any]) -> bool:
    return bool(results["distributed_training"]["is_recorded"])


def test_recorded_ddp_steps_equal_plain_steps_and_a_single_rank(tmp_path: Path) -> None:
    """--deterministic: otherwise other kernels may be selected, which add in another order."""
    flags = ("--deterministic", "--model-name=resnet18", "--clip-norm=1", "--ema-decay=0.9", "--label-smoothing=0.1")
    ddp = ("--strategy=ddp", "--processes=1")
    recorded = train(tmp_path / "recorded", *flags, *ddp)
    plain = train(tmp_path / "plain", *flags, *ddp, "--compile=never")
    single = train(tmp_path / "single", *flags)
    assert is_recorded(recorded)
    assert is_recorded(single)
    assert not is_recorded(plain)
    assert recorded["strategy"] == "ddp"
    assert recorded["weights_sha256"] == plain["weights_sha256"] == single["weights_sha256"]
    assert recorded["optimizer_sha256"] == plain["optimizer_sha256"] == single["optimizer_sha256"]
    assert step_losses(tmp_path / "recorded") == step_losses(tmp_path / "plain")


@pytest.mark.parametrize("flags", [("--dropout=0.3", "--accumulate=2"), ("--skip-nonfinite=2", "--inject=nan step=9")])
def test_recorded_ddp_steps_equal_plain_steps_with(tmp_path: Path, flags: tuple[str, ...]) -> None:
    flags = ("--strategy=ddp", "--processes=1", "--deterministic", *flags)
    recorded, plain = train(tmp_path / "recorded", *flags), train(tmp_path / "plain", *flags, "--compile=never")
    assert is_recorded(recorded)
    assert recorded["weights_sha256"] == plain["weights_sha256"]


def test_exact_steps_have_one_hash_recorded_plain_and_on_1_2_and_4_ranks(tmp_path: Path) -> None:
    recorded = train(tmp_path / "recorded", *EXACT)
    assert is_recorded(recorded)
    others = {
        "plain": ("--compile=never",),
        "nccl": ("--strategy=ddp", "--processes=1"),
        "two": ("--ranks-per-gpu=2", "--processes=2"),
        "four": ("--ranks-per-gpu=4",),
    }
    found = {name: train(tmp_path / name, *EXACT, *flags) for name, flags in others.items()}
    assert [found[name]["world_size"] for name in others] == [1, 1, 2, 4]
    assert found["four"]["distributed_training"]["backend"] == "gloo"
    assert is_recorded(found["nccl"])
    assert {results["weights_sha256"] for results in found.values()} == {recorded["weights_sha256"]}
    assert {results["optimizer_sha256"] for results in found.values()} == {recorded["optimizer_sha256"]}


def test_recorded_exact_steps_with_audits_and_a_flip(tmp_path: Path) -> None:
    """An audited step is computed plainly, with the same bits. A flip is found."""
    undisturbed = train(tmp_path / "undisturbed", *EXACT)
    audited = train(tmp_path / "audited", *EXACT, "--audit=30%")
    assert is_recorded(audited)
    assert audited["audits"] > 0
    assert audited["weights_sha256"] == undisturbed["weights_sha256"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rehearsal_of_two_ranks_on_one_gpu(tmp_path: Path, strategy: str) -> None:
    found = train(tmp_path, "--ranks-per-gpu=2", f"--strategy={strategy}", "--max-steps=6")
    assert found["world_size"] == 2
    assert [entry["device"] for entry in found["process_metrics"]] == ["cuda:0", "cuda:0"]
    assert not is_recorded(found)


def test_a_killed_rank_of_recorded_ddp_steps_ends_with_the_bits_of_an_undisturbed_run(tmp_path: Path) -> None:
    flags = ("--strategy=ddp", "--processes=1", "--deterministic", "--save-steps=3")
    whole = train(tmp_path / "whole", *flags)
    killed = train(tmp_path / "killed", *flags, "--inject=kill rank=0 step=8")
    assert is_recorded(killed)
    assert [
        row["kind"] for row in map(json.loads, (tmp_path / "killed" / "faults.jsonl").read_text().splitlines())
    ] == ["kill"]
    assert killed["weights_sha256"] == whole["weights_sha256"]


def test_a_gpu_that_hangs_in_a_recorded_step_is_ended_and_the_run_restarts(tmp_path: Path) -> None:
    flags = ("--strategy=ddp", "--processes=1", "--deterministic", "--save-steps=3")
    whole = train(tmp_path / "whole", *flags)
    hung = train(tmp_path / "hung", *flags, "--hang-timeout-s=10", "--inject=gpu-hang rank=0 step=8")
    assert hung["weights_sha256"] == whole["weights_sha256"]
    failure = json.loads((tmp_path / "hung" / "failure.json").read_text())
    assert failure["cause"] == "hang"
    assert failure["is_restarted"] is True
