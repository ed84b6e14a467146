"""A receipt of four ranks is verified on one. One change of anything is found, and a forged step by its replay."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.cli import paceline
from harness.forged import reseal
from paceline.cli.main import main
from paceline.data.sources import custom
from paceline.errors import EXIT_DIFFERENT, EXIT_FINISHED, EXIT_USER, UserError
from paceline.runs.receipt import hash_file, make_receipt, read_receipt
from paceline.tools.trust import replayed
from paceline.tools.trust.findings import Findings
from paceline.tools.trust.replayed import Draw, Stretch, choose_stretches
from paceline.tools.trust.verify import verify_run

pytestmark = pytest.mark.long
NOTHING = Draw(steps=0, at_most=0, tolerance=1e-3)
EVERYTHING = Draw(steps=1000, at_most=0, tolerance=1e-3)
CODE = """
import numpy as np
import torch

def data(data_dir):
    x, y = np.load("x.npy"), np.load("y.npy")
    return (x[:240], y[:240]), (x[240:], y[240:])

def loss(logits, labels):
    return torch.nn.functional.cross_entropy(logits, labels)
"""
FLAGS = (
    *(
        "--dataset",
        "mine.py:data",
        "--loss",
        "mine.py:loss",
        "--model-name",
        "mlp",
        "--hidden-size",
        "16",
        "--device",
        "cpu",
    ),
    *("--global-batch-size", "32", "--epochs", "3", "--train-split", "0.8", "--exact", "--processes", "4", "--track"),
    *("--keep-every-epochs", "1", "--save-steps", "4", "--keep-last", "1", "--output-dir", "run", "--quiet"),
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of 18 steps on four ranks, its code and its data."""
    folder = tmp_path_factory.mktemp("verify")
    values = np.random.default_rng(0)
    np.save(folder / "x.npy", values.normal(size=(300, 8)).astype(np.float32))
    np.save(folder / "y.npy", values.integers(0, 3, size=300))
    (folder / "mine.py").write_text(CODE)
    answer = paceline("train", "synthetic-mlp", *FLAGS, cwd=folder)
    assert answer.code == EXIT_FINISHED, answer
    return folder


@pytest.fixture
def copy(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to change. The working folder, because the run names its files by relative paths."""
    shutil.copytree(made, tmp_path / "copy", symlinks=True)
    monkeypatch.chdir(tmp_path / "copy")
    monkeypatch.setenv("PACELINE_TRUST_CODE", "1")
    custom.load.cache_clear()  # a process calls the function of a data set once
    return tmp_path / "copy" / "run"


def check(run: Path, draw: Draw = NOTHING) -> Findings:
    return verify_run(run, read_receipt(run / "receipt.json"), [], draw).findings


def differing(findings: Findings) -> list[str]:
    return [finding.what for finding in findings.of("different")]


def test_four_ranks_are_verified_on_one(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(list((copy / "checkpoints").glob("step-*"))) == 3
    receipt = read_receipt(copy / "receipt.json")
    assert receipt.links["machine"]["ranks"] == 4
    assert [entry["step"] for entry in receipt.links["checkpoints"]] == [4, 6, 8, 12, 16, 18]  # three were dropped
    assert main(["verify", str(copy), "--steps", "1000"]) == EXIT_FINISHED
    out = capsys.readouterr().out
    assert "18 of 18 replayed on one rank" in out
    assert "6 checkpoints, bit for bit" in out
    assert "probability of 100%" in out


def flip_a_weight(run: Path) -> None:
    file = run / "checkpoints" / "latest" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    reseal(file.parent.resolve())


def change_a_metric(run: Path) -> None:
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text.replace('"accuracy": 0.', '"accuracy": 0.9', 1))


def change_a_sample(run: Path) -> None:
    samples = np.load(run.parent / "x.npy")
    samples[17, 3] += 1
    np.save(run.parent / "x.npy", samples)
    custom.load.cache_clear()


def change_a_flag(run: Path) -> None:
    text = (run / "config.yaml").read_text()
    changed = text.replace("seed: 42", "seed: 43")
    assert changed != text
    (run / "config.yaml").write_text(changed)


def change_a_line_of_code(run: Path) -> None:
    file = run.parent / "mine.py"
    file.write_text(file.read_text().replace("(logits, labels)\n", "(logits, labels) * 1.0\n"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (flip_a_weight, "weights"),
        (change_a_metric, "metrics"),
        (change_a_sample, "data"),
        (change_a_flag, "config"),
        (change_a_line_of_code, "code"),
    ],
)
def test_a_change_is_found(copy: Path, change: Callable[[Path], None], named: str) -> None:
    assert differing(check(copy)) == []
    change(copy)
    assert differing(check(copy))[0] == named  # other weights also give other results


def rewrite_receipt(run: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A forger makes a new chain. Only a replay, or a signature, can find it."""
    links = read_receipt(run / "receipt.json").links
    change(links)
    (run / "receipt.json").write_text(json.dumps(make_receipt("run", links)))


def forge_a_norm(run: Path) -> None:
    """Not a loss: metrics.jsonl has the means of the losses."""
    trace = bytearray((run / "steps.f64").read_bytes())
    struct.pack_into("<d", trace, 16 * 10 + 8, 0.5)  # of step 11
    (run / "steps.f64").write_bytes(trace)
    rewrite_receipt(run, lambda links: links["metrics"].update({"steps.f64": hash_file(run / "steps.f64")}))


def test_a_forged_step_with_a_new_chain_is_found_by_its_replay(copy: Path) -> None:
    forge_a_norm(copy)
    assert differing(check(copy)) == []
    (finding,) = check(copy, EVERYTHING).of("different")
    assert finding.what == "steps"
    assert finding.text.startswith("step 11: gradient norm 0.5 ")


def test_a_broken_chain_is_named_and_the_rest_is_checked(copy: Path) -> None:
    values = json.loads((copy / "receipt.json").read_text())
    values["links"][-1]["content"]["test_accuracy"] = 0.99
    (copy / "receipt.json").write_text(json.dumps(values))
    findings = check(copy)
    assert "results" in findings.of("different")[0].text
    assert {"config", "code", "metrics", "weights", "data"} <= {finding.what for finding in findings.of("proved")}


def test_signatures(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("mine", "other"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", name], check=True, capture_output=True)
    assert main(["sign", str(copy), "--key", "mine"]) == EXIT_FINISHED
    quick = ["verify", str(copy), "--steps", "0"]
    assert main([*quick, "--signers", "mine.pub"]) == EXIT_FINISHED
    capsys.readouterr()
    assert main([*quick, "--signers", "other.pub"]) == EXIT_DIFFERENT
    assert "is not in other.pub" in capsys.readouterr().out
    rewrite_receipt(copy, lambda links: links["results"].update(test_accuracy=0.99))
    assert main(quick) == EXIT_DIFFERENT
    assert "signature" in capsys.readouterr().out.partition("DIFFERENT")[2]


def test_without_checkpoints_the_replay_starts_at_zero(copy: Path) -> None:
    shutil.rmtree(copy / "checkpoints")
    findings = check(copy, EVERYTHING)
    assert differing(findings) == []
    assert "weights" in [finding.what for finding in findings.of("not proved")]
    assert any(finding.what == "steps" for finding in findings.of("proved"))


def test_what_is_not_a_receipt(copy: Path) -> None:
    values = json.loads((copy / "receipt.json").read_text())
    (copy / "receipt.json").write_text(json.dumps({**values, "schema_version": 99}))
    with pytest.raises(UserError, match="newer Paceline"):
        read_receipt(copy / "receipt.json")
    (copy / "receipt.json").write_text("[1]")
    with pytest.raises(UserError, match="not a receipt"):
        read_receipt(copy / "receipt.json")
    (copy / "receipt.json").unlink()
    assert main(["verify", str(copy)]) == EXIT_USER


def test_stretches_end_at_saved_checkpoints_and_keep_to_the_limit() -> None:
    every = choose_stretches(20, [0, 10], [5, 10, 15, 20], Draw(20, 0, 0.0))
    assert every == [Stretch(0, 10), Stretch(10, 20)]
    for _ in range(20):
        limited = choose_stretches(2000, [0, 1000], [500, 1000, 2000], Draw(20, 100, 0.0))
        assert sum(map(len, limited)) <= 100
        assert all(stretch.start in (0, 1000) and len(stretch) <= 50 for stretch in limited)


def test_ranks_without_exact_are_compared_within_a_tolerance(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank rounds the sums of two ranks differently. A forged norm is found if it is off by more."""
    monkeypatch.chdir(made)
    monkeypatch.setenv("PACELINE_TRUST_CODE", "1")
    custom.load.cache_clear()
    flags = [flag for flag in FLAGS if flag != "--exact"]
    flags[flags.index("--processes") + 1], flags[flags.index("--output-dir") + 1] = "2", "plain"
    answer = paceline("train", "synthetic-mlp", *flags, cwd=made)
    assert answer.code == EXIT_FINISHED, answer
    run = made / "plain"

    proof = verify_run(run, read_receipt(run / "receipt.json"), [], EVERYTHING)

    assert (proof.replayed_steps, proof.tolerance) == (proof.total_steps, EVERYTHING.tolerance)
    assert differing(proof.findings) == []
    assert "steps" in {finding.what for finding in proof.findings.of("not proved")}
    monkeypatch.setattr(replayed, "_COMPARABLE_STEPS", 2)  # later steps of an honest run differ by more and more
    assert verify_run(run, read_receipt(run / "receipt.json"), [], EVERYTHING).replayed_steps == 3 * 2
    monkeypatch.undo()
    monkeypatch.chdir(made)
    monkeypatch.setenv("PACELINE_TRUST_CODE", "1")
    forge_a_norm(run)
    assert differing(check(run, EVERYTHING)) == ["steps"]
