"""Tests that need a GPU. Run with `pytest -m gpu`; CI has none."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness.runs import read_results, step_losses
from paceline.cli.main import main
from paceline.models.dropout import ShareKeys, draw_kept
from paceline.models.registry import build_model
from paceline.settings.schema import ModelConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]
QUICK = ["--num-samples=2560", "--epochs=2", "--global-batch-size=256", "--log-frequency=1", "--track"]


def train(folder: Path, *flags: str) -> list[float]:
    assert main(["train", "shapes-cnn", *QUICK, "--output-dir", str(folder), *flags]) == 0
    return step_losses(folder)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("strategy", ["single", "fsdp"])
def test_mixed_precision_learns_like_full_precision(tmp_path: Path, dtype: str, strategy: str) -> None:
    full = train(tmp_path / "full", "--no-amp")
    mixed = train(tmp_path / "mixed", "--amp-dtype", dtype, "--strategy", strategy)
    assert len(mixed) == len(full)
    assert all(math.isfinite(loss) for loss in mixed)
    # Half the digits: over these few steps the curves agree to about two digits.
    assert mixed == pytest.approx(full, abs=0.05)
    assert read_results(tmp_path / "mixed")["distributed_training"]["precision"] != "float32"


def test_fsdp_with_cpu_offload(tmp_path: Path) -> None:
    sharded = train(tmp_path / "offload", "--strategy", "fsdp", "--cpu-offload", "--no-amp")
    # cuDNN selects other kernels for other layouts. On CPUs, TF32 in one of the two changes no loss by 0.0001.
    assert sharded == pytest.approx(train(tmp_path / "single", "--no-amp"), abs=1e-3)


def test_resume_on_the_gpu(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", "--deterministic")
    train(tmp_path / "halves", "--deterministic", "--max-steps", "5")
    resumed = train(tmp_path / "halves", "--deterministic", "--resume", "auto")
    assert resumed == whole
    hashes = [read_results(tmp_path / name)["weights_sha256"] for name in ("whole", "halves")]
    assert hashes[0] == hashes[1]


def test_a_model_that_counts_on_the_host_is_not_recorded(tmp_path: Path) -> None:
    """A recording would use the same layers in every step. The warm-up does not change the count."""
    flags = ("--model-name=harness.branching_model:build_counting", "--no-amp", "--deterministic")
    recorded, plain = (train(tmp_path / mode, *flags, f"--compile={mode}") for mode in ("auto", "never"))
    assert recorded == plain


def test_compiled_model_trains(tmp_path: Path) -> None:
    assert train(tmp_path, "--compile", "always")[-1] < 2.4


@pytest.mark.parametrize("name", ["vgg19", "resnet50"])
def test_logits_equal_torchvisions_for_equal_weights(name: str) -> None:
    torchvision = pytest.importorskip("torchvision", reason="needs torchvision to compare with")
    theirs = torchvision.models.get_model(name).cuda().eval()
    ours = build_model(ModelConfig(model_name=name), (3, 224, 224), 1000).cuda().eval()
    ours.load_state_dict(theirs.state_dict())
    images = torch.randn(4, 3, 224, 224, device="cuda")
    with torch.no_grad():
        assert torch.equal(ours(images), theirs(images))


EXACT = ("--exact", "--lanes", "4", "--model-name", "resnet18")


def exact_hashes(folder: Path) -> tuple[str, str]:
    results = read_results(folder)
    return results["weights_sha256"], results["optimizer_sha256"]


def test_exact_gives_the_same_bits_twice_and_after_a_kill(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", *EXACT)
    assert train(tmp_path / "again", *EXACT) == whole
    assert exact_hashes(tmp_path / "again") == exact_hashes(tmp_path / "whole")

    arguments = [sys.executable, "-m", "paceline", "train", "shapes-cnn", *QUICK, *EXACT, "--save-steps", "2"]
    arguments += ["--output-dir", str(tmp_path / "killed")]
    surroundings = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(arguments, env=surroundings, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any(line.startswith("step 8/") for line in process.stdout)
        process.kill()
    assert process.returncode == -9
    assert len(step_losses(tmp_path / "killed")) < len(whole)
    assert train(tmp_path / "killed", *EXACT, "--save-steps", "2", "--resume", "auto") == whole
    assert exact_hashes(tmp_path / "killed") == exact_hashes(tmp_path / "whole")


def test_a_cpu_checkpoint_resumes_on_the_gpu(tmp_path: Path) -> None:
    flags = ("--no-amp", "--optimizer", "adamw", "--base-lr", "0.001", "--ema-decay", "0.9")
    train(tmp_path, *flags, "--device", "cpu", "--max-steps", "5")
    losses = train(tmp_path, *flags, "--resume", "auto")
    assert len(losses) == 18
    assert read_results(tmp_path)["process_metrics"][0]["device"] == "cuda:0"


LOOKS_AT_VALUES = """
from paceline.models.cnn import CNN
class Looking(CNN):
    def forward(self, x):
        return super().forward(x) if x.sum().item() < 1e12 else x  # no recording can follow this
def build(num_classes, input_shape):
    return Looking(input_shape, num_classes)
"""


def test_a_model_that_cannot_be_recorded_learns_the_same(tmp_path: Path) -> None:
    model = tmp_path / "looking.py"
    model.write_text(LOOKS_AT_VALUES)
    flags = ("--model-name", f"{model}:build", "--deterministic", "--no-amp")
    plain = train(tmp_path / "plain", *flags, "--compile=never")
    assert train(tmp_path / "refused", *flags) == plain
    assert "not recorded as a CUDA graph" in (tmp_path / "refused" / "logs" / "rank-0.log").read_text()


def test_a_recorded_step_equals_a_plain_step(tmp_path: Path) -> None:
    # --deterministic: otherwise other kernels may be selected, which add in another order.
    plain = train(tmp_path / "plain", "--deterministic", "--compile", "never")
    assert train(tmp_path / "recorded", "--deterministic") == plain


def test_dropout_is_the_same_on_cpu_and_gpu() -> None:
    """Keys and masks are exact integer arithmetic."""
    keys = [ShareKeys(3, 1, device).of(40, 64) for device in ("cpu", "cuda")]
    assert torch.equal(keys[0], keys[1].cpu())
    inputs = torch.ones(64, 3, 5, 7)
    masks = [draw_kept(inputs.shape, 0.3, drawn, 2) for drawn in keys]
    assert torch.equal(masks[0], masks[1].cpu())


@pytest.mark.parametrize("flags", [(), ("--accumulate=4",)])
def test_a_recorded_step_uses_the_dropout_of_plain_steps(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """A recording is replayed with other keys at each step."""
    flags = ("--dropout=0.5", "--no-amp", "--deterministic", *flags)
    recorded, plain = (train(tmp_path / mode, *flags, f"--compile={mode}") for mode in ("auto", "never"))
    assert recorded == plain


def test_compiled_steps_use_the_dropout_of_plain_steps(tmp_path: Path) -> None:
    """Compiled and recorded, with microbatches: other kernels, the same masks."""
    flags = ("--dropout=0.5", "--no-amp", "--accumulate=2", "--max-steps=6")
    compiled, plain = (train(tmp_path / mode, *flags, f"--compile={mode}") for mode in ("always", "never"))
    # Other masks change the first losses by 0.01 and more.
    assert compiled == pytest.approx(plain, abs=1e-3)
    assert train(tmp_path / "cpu", *flags, "--device=cpu") == pytest.approx(plain, abs=1e-3)
