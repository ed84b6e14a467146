"""`paceline compare`: equal, or the first step and tensor that differ."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from harness.cli import paceline
from harness.runs import step_losses
from paceline.checkpoints.format import MANIFEST, FileSeal, Manifest, read_manifest
from paceline.checkpoints.payload import Box, Piece, write_pieces
from paceline.cli.main import main
from paceline.runs.comparison import largest_loss_difference, logged_losses

QUICK = ["--num-samples=640", "--global-batch-size=64", "--epochs=1", "--max-steps=4", "--log-frequency=1"]
STEP = "step-00000004"
Compare = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of one command, and one with another seed."""
    folder = tmp_path_factory.mktemp("runs")
    for name, seed in (("one", "42"), ("twin", "42"), ("other", "43")):
        flags = [*QUICK, "--processes=1", "--seed", seed, "--output-dir", name, "--track"]
        answer = paceline("train", *flags, cwd=folder)
        assert answer.code == 0, answer
    return folder


@pytest.fixture
def compare(runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Compare:
    """Run the command in this process, because torch is imported already."""
    monkeypatch.chdir(runs)

    def call(*arguments: str | Path) -> tuple[int, str, str]:
        code = main(["compare", *map(str, arguments)])
        return code, *capsys.readouterr()

    return call


def tensors_of(run: Path, kind: str) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / STEP / f"{kind}.safetensors")


def whole(tensors: dict[str, torch.Tensor]) -> dict[str, Piece]:
    return {
        name: Piece(value, Box((0,) * value.dim(), tuple(value.shape)), tuple(value.shape))
        for name, value in tensors.items()
    }


def replace_payload(run: Path, kind: str, files: dict[str, dict[str, Piece]]) -> None:
    """Replace the files of one kind in the checkpoint, and seal it again."""
    folder = run / "checkpoints" / STEP
    manifest = read_manifest(folder)
    (folder / f"{kind}.safetensors").unlink()
    kept: dict[str, FileSeal] = {name: seal for name, seal in manifest.files.items() if not name.startswith(kind)}
    kept.update({name: write_pieces(folder / name, pieces) for name, pieces in files.items()})
    (folder / MANIFEST).write_bytes(Manifest(kept, manifest.about).to_bytes())


def test_the_same_command_twice_is_equal(runs: Path) -> None:
    answer = paceline("compare", "one", "twin", cwd=runs)
    assert answer.code == 0, answer
    assert "config: the same" in answer.out
    assert "A and B are equal: final weights, 4 logged losses" in answer.out
    assert "tensors of the checkpoints of step 4" in answer.out
    assert answer.err == ""


def test_another_seed_is_shown_by_config_step_and_tensor(runs: Path, compare: Compare) -> None:
    code, out, _ = compare("one", "other")
    assert code == 1
    assert ["seed", "42", "43"] in [line.split() for line in out.splitlines()]
    assert "output_dir" not in out
    mine, other = step_losses(runs / "one"), step_losses(runs / "other")
    assert f"first at step 1: loss {mine[0]!r} in A, {other[0]!r} in B" in out
    name = min(tensors_of(runs / "one", "model"))
    assert f"first tensor at step 4: model tensor {name}: largest absolute difference" in out


def test_each_of_many_is_compared_with_the_first(compare: Compare) -> None:
    code, out, _ = compare("one", "twin", "other")
    assert code == 1
    assert "A and B are equal" in out
    assert "A and C differ" in out
    assert ["seed", "42", "42", "43"] in [line.split() for line in out.splitlines()]


def test_json_has_the_same_content(runs: Path, compare: Compare) -> None:
    code, out, _ = compare("one", "other", "twin", "--json")
    assert code == 1
    answer: dict[str, Any] = json.loads(out)
    assert answer["equal"] is False
    assert answer["config_differences"] == {"seed": {"A": 42, "B": 43, "C": 42}}
    assert [entry["path"] for entry in answer["runs"]] == ["one", "other", "twin"]
    differing, equal = answer["comparisons"]
    losses = {"A": step_losses(runs / "one")[0], "B": step_losses(runs / "other")[0]}
    assert differing["first_step"] == {"step": 1, "loss": losses}
    assert differing["same_hashes"] == {"weights_sha256": False}
    assert (equal["equal"], equal["first_step"], equal["first_tensor"]) == (True, None, None)


@pytest.mark.parametrize(("kind", "position"), [("model", (3, 5)), ("optimizer", (2, 7))])
def test_the_one_tensor_that_differs_is_named(
    runs: Path, compare: Compare, tmp_path: Path, kind: str, position: tuple[int, int]
) -> None:
    shutil.copytree(runs / "twin", tmp_path / "edited", symlinks=True)
    tensors = tensors_of(tmp_path / "edited", kind)
    name = next(name for name in sorted(tensors) if name.startswith("classifier") and tensors[name].dim() == 2)
    tensors[name][position] += 0.5
    tensors[name][0, 0] += 0.25
    replace_payload(tmp_path / "edited", kind, {f"{kind}.safetensors": whole(tensors)})
    code, out, _ = compare("one", tmp_path / "edited")
    assert code == 1
    assert f"{kind} tensor {name}: largest absolute difference 0.5 at {list(position)}" in out
    assert "the same: 4 logged losses" in out


@pytest.mark.parametrize("value", [-0.0, float("nan")])
def test_bits_are_compared_and_not_values(runs: Path, compare: Compare, tmp_path: Path, value: float) -> None:
    for name, number in (("left", 0.0), ("right", value)):
        shutil.copytree(runs / "one", tmp_path / name, symlinks=True)
        tensors = tensors_of(tmp_path / name, "model")
        tensors["classifier.bias"][4] = number
        replace_payload(tmp_path / name, "model", {"model.safetensors": whole(tensors)})
    code, out, _ = compare(tmp_path / "left", tmp_path / "right")
    assert code == 1
    gap = "0" if value == 0.0 else "inf"
    assert f"classifier.bias: largest absolute difference {gap} at [4]" in out
    assert compare(tmp_path / "left", tmp_path / "right", "--json")[0] == 1


def test_slices_are_compared_with_complete_tensors(runs: Path, compare: Compare, tmp_path: Path) -> None:
    shutil.copytree(runs / "twin", tmp_path / "sharded", symlinks=True)
    halves: list[dict[str, Piece]] = [{}, {}]
    for name, value in tensors_of(tmp_path / "sharded", "model").items():
        cut = value.shape[0] // 2
        for half, start, part in zip(halves, (0, cut), (value[:cut], value[cut:]), strict=True):
            offset = (start, *(0,) * (value.dim() - 1))
            half[name] = Piece(part.contiguous(), Box(offset, tuple(part.shape)), tuple(value.shape))
    files = {f"model-{number:05}-of-00002.safetensors": half for number, half in enumerate(halves)}
    replace_payload(tmp_path / "sharded", "model", files)
    code, out, _ = compare("one", tmp_path / "sharded")
    assert code == 0, out


def test_an_unfinished_run_is_not_equal(runs: Path, compare: Compare, tmp_path: Path) -> None:
    shutil.copytree(runs / "twin", tmp_path / "stopped", symlinks=True)
    status = {"status": "failed", "reason": "interrupted by the user"}
    (tmp_path / "stopped" / "status.json").write_text(json.dumps(status))
    code, out, _ = compare("one", tmp_path / "stopped")
    assert code == 1
    assert "B has not finished (failed: interrupted by the user)" in out
    assert "the same: 4 logged losses" in out


def test_an_epoch_metric_alone_can_differ(runs: Path, compare: Compare, tmp_path: Path) -> None:
    shutil.copytree(runs / "twin", tmp_path / "edited", symlinks=True)
    path = tmp_path / "edited" / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[-1]["accuracy"] = 0.5
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, _ = compare("one", tmp_path / "edited")
    assert code == 1
    assert "first epoch metric: epoch 0 test accuracy (step 4)" in out
    assert "0.5 in B" in out


def test_a_damaged_checkpoint_is_not_compared(runs: Path, compare: Compare, tmp_path: Path) -> None:
    shutil.copytree(runs / "twin", tmp_path / "damaged", symlinks=True)
    path = tmp_path / "damaged" / "checkpoints" / STEP / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    code, _, err = compare("one", tmp_path / "damaged")
    assert code == 4
    assert "the checkpoint is damaged" in err
    assert (tmp_path / "damaged" / "checkpoints" / STEP).is_dir()  # read, not set aside


def test_losses_are_compared_at_common_steps() -> None:
    often = [{"kind": "step", "step": step, "loss": float(step)} for step in (1, 2, 3, 4)]
    seldom = [{"kind": "step", "step": 2, "loss": 1.5}, {"kind": "step", "step": 3, "loss": 3.0}]
    assert set(logged_losses(often)) & set(logged_losses(seldom)) == {(2, 3)}
    assert largest_loss_difference(often, often) == 0.0
    assert largest_loss_difference(often, seldom) == float("inf")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["one"], "needs runs to compare"),
        (["one", "one"], "given twice"),
        (["one", "nowhere"], "not a run folder"),
        (["one", "twin", "--yaml"], "unknown flag '--yaml'"),
    ],
)
def test_wrong_input(compare: Compare, arguments: list[str], part: str) -> None:
    code, out, err = compare(*arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert part in err


def test_results_that_cannot_be_read(runs: Path, compare: Compare, tmp_path: Path) -> None:
    shutil.copytree(runs / "twin", tmp_path / "torn", symlinks=True)
    (tmp_path / "torn" / "results.json").write_text("{")
    code, _, err = compare("one", tmp_path / "torn")
    assert code == 2
    assert "results cannot be read" in err
