"""A run's best weights for other programs: each format loads without Paceline and gives the run's logits."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from harness.cli import Answer, command, paceline
from harness.extras import need_packages
from harness.runs import read_results
from paceline.cli.evaluate import Export
from paceline.cli.main import main
from paceline.data.augment import Pipeline
from paceline.data.sources.folder import read_picture
from paceline.data.sources.shapes import CLASSES
from paceline.errors import PacelineError, UserError
from paceline.library.run import load_run
from paceline.settings.declare import fields_of
from paceline.settings.extras import how_to_install
from paceline.training.export import FORMATS, PREPARE_IMAGE, Loaded, describe_preprocessing, export_run
from paceline.training.reuse import OpenRun, open_run, predict_pictures

# One thread in both processes: logits are bit-equal only with the same number of threads.
QUICK = ["--num-samples=640", "--global-batch-size=64", "--epochs=2", "--processes=1", "--omp-num-threads=1"]
WITHOUT_EXTRAS = ("safetensors", "torchscript", "torch.export")
FILES = {"card.md", "labels.json", "labels.txt", "preprocessing.json"}
# A program of another user: plain torch, without paceline.
RELOAD = """
import sys
sys.modules["paceline"] = None
import torch
from safetensors.torch import load_file
from torch import nn

class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        conv = [[nn.Conv2d(i, o, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)] for i, o in ((3, 16), (16, 32), (32, 64))]
        self.features = nn.Sequential(*sum(conv, []))
        self.hidden = nn.Sequential(nn.Flatten(), nn.Linear(1024, 512), nn.ReLU())
        self.classifier = nn.Linear(512, 10)

    def forward(self, x):
        return self.classifier(self.hidden(self.features(x)))

safetensors, torchscript, pt2, probe, answer = sys.argv[1:]
plain = Plain()
plain.load_state_dict(load_file(safetensors))
models = {"safetensors": plain, "torchscript": torch.jit.load(torchscript)}
models["torch.export"] = torch.export.load(pt2).module()
inputs = torch.load(probe)
with torch.no_grad():
    torch.save({name: [model(inputs), model(inputs[:1])] for name, model in models.items()}, answer)
"""


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with a moving average, with a default name."""
    folder = tmp_path_factory.mktemp("exporting") / "shapes-cnn-20260102-030405"
    flags = ["--ema-decay=0.5", "--track", "--output-dir", str(folder)]
    answer = paceline("train", *QUICK, *flags, cwd=folder.parent)
    assert answer.code == 0, answer
    return folder


@pytest.fixture(scope="module")
def exports(run_folder: Path) -> dict[str, Answer]:
    """The run in every format without an extra: one by the command, the others in this process, for speed.

    A Python warning would end any of them.
    """
    words = ["export", str(run_folder), "--format"]
    answers = {"torchscript": paceline(*words, "torchscript", cwd=run_folder.parent, PYTHONWARNINGS="error")}
    for name in ("safetensors", "torch.export"):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([*words, name])
        answers[name] = Answer(code, out.getvalue(), err.getvalue())
    return answers


@pytest.fixture(scope="module")
def opened(run_folder: Path) -> OpenRun:
    return open_run(run_folder, ["--device", "cpu"])


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(7).integers(0, 256, (41, 57, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "picture.png")
    return tmp_path / "picture.png"


def snippet_of(folder: Path) -> str:
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "card.md").read_text(), flags=re.DOTALL)
    return str(code)


def assert_snippet_labels_as_we_do(folder: Path, picture: Path, opened: OpenRun, monkeypatch: Any, capsys: Any) -> None:
    """Run the card's code in a copy of the export, with a picture next to it."""
    copy = shutil.copytree(folder, picture.parent / "export")
    shutil.copy(picture, copy)
    monkeypatch.chdir(copy)
    names: dict[str, Any] = {}
    exec(compile(snippet_of(folder), "card.md", "exec"), names)
    (ours,) = predict_pictures(opened, [picture])
    theirs = torch.as_tensor(names["logits"]).softmax(0)
    assert theirs.tolist() == pytest.approx(ours, abs=1e-6)
    assert capsys.readouterr().out.strip() == CLASSES[int(np.argmax(ours))]


@pytest.mark.parametrize("name", WITHOUT_EXTRAS)
def test_verdict_and_files(exports: dict[str, Answer], run_folder: Path, name: str) -> None:
    answer = exports[name]
    assert answer.code == 0, answer
    assert "gives the run's logits bit for bit on 8 random samples" in answer.out
    assert answer.err == ""
    folder = run_folder / f"export-{name}"
    assert {path.name for path in folder.iterdir()} == {*FILES, FORMATS[name].file}
    assert (folder / "labels.txt").read_text().splitlines() == list(CLASSES)
    assert json.loads((folder / "labels.json").read_text()) == {str(i): c for i, c in enumerate(CLASSES)}
    assert not list(run_folder.glob(".*"))  # the temporary folder is removed


def test_models_load_without_paceline_and_agree(
    exports: dict[str, Answer], run_folder: Path, opened: OpenRun, tmp_path: Path
) -> None:
    assert all(answer.code == 0 for answer in exports.values())
    samples = torch.randint(0, 256, (5, *opened.record.info.sample_shape), dtype=torch.uint8)
    inputs = opened.record.pipeline.for_evaluation(samples).contiguous()
    torch.save(inputs, tmp_path / "probe.pt")
    files = [str(run_folder / f"export-{name}" / FORMATS[name].file) for name in WITHOUT_EXTRAS]
    reloaded = command(sys.executable, "-c", RELOAD, *files, "probe.pt", "answer.pt", cwd=tmp_path)
    assert reloaded.code == 0, reloaded
    model = opened.model.module.eval()
    with torch.no_grad():
        ours = [model(inputs), model(inputs[:1])]
    answers = torch.load(tmp_path / "answer.pt")
    assert set(answers) == set(WITHOUT_EXTRAS)
    for name, theirs in answers.items():
        assert torch.allclose(theirs[0], ours[0], rtol=0, atol=1e-6), name
        assert torch.allclose(theirs[1], ours[1], rtol=0, atol=1e-6), name
        assert torch.equal(theirs[0], answers["safetensors"][0]), name  # bit-equal to each other
        assert theirs[0].dtype == torch.float32


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("name", WITHOUT_EXTRAS)
def test_code_of_the_card_runs(
    exports: dict[str, Answer],
    run_folder: Path,
    opened: OpenRun,
    name: str,
    picture: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exports[name].code == 0, exports[name]
    assert_snippet_labels_as_we_do(run_folder / f"export-{name}", picture, opened, monkeypatch, capsys)


def test_the_card_has_all_known_facts(exports: dict[str, Answer], run_folder: Path) -> None:
    assert exports["safetensors"].code == 0, exports["safetensors"]
    folder = run_folder / "export-safetensors"
    card = (folder / "card.md").read_text()
    results = read_results(run_folder)
    environment = json.loads((run_folder / "environment.json").read_text())
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    rows = [
        *("# shapes-cnn-20260102-030405", "| recipe | shapes-cnn |", f"SHA-256 `{digest}`", "moving average"),
        *("576 train, 64 validation, 1,000 test samples", "| epochs | 2 |", "| steps | 18 |"),
        *("| global batch size | 64 |", "| optimizer | nesterov, momentum 0.9", "| learning rate | 0.025 at its peak"),
        *("| precision | float32 |", "| world size | 1 |", "| strategy | single |", "| seed | 42 |"),
        *(f"| test accuracy | {results['test_accuracy']:.2%}", f"| test loss | {results['test_loss']:.4f} |"),
        *(f"| best epoch | {results['best_epoch']} |", "| run | finished", f"torch {torch.__version__}"),
        *(f"| {c} | 100 | {results['test']['class_accuracy'][c]:.2%} |" for c in CLASSES),
        environment["git"]["commit"] if environment["git"] else "| git commit | not recorded |",
    ]
    for row in rows:
        assert row in card, row


def _remove_results(run: Path) -> None:
    (run / "results.json").unlink()
    (run / "environment.json").unlink()


def _age_results(run: Path) -> None:
    results = read_results(run)
    (run / "results.json").write_text(json.dumps({**results, "best_epoch": results["best_epoch"] + 7}))


def _forge_results(run: Path) -> None:
    """Content that another user may have written: other types, missing parts, deep nesting."""
    results = read_results(run)
    results["test"]["confusion_matrix"] = [[1]]
    (run / "results.json").write_text(json.dumps(results))
    (run / "environment.json").write_text("[" * 100_000)
    (run / "status.json").write_text('{"step": 3, "status": 7}')


@pytest.mark.parametrize("damage", [_remove_results, _age_results, _forge_results])
def test_the_card_names_missing_facts(run_folder: Path, tmp_path: Path, damage: Callable[[Path], None]) -> None:
    unfinished = tmp_path / "unfinished"
    shutil.copytree(run_folder, unfinished, symlinks=True)
    damage(unfinished)
    export_run(unfinished, "safetensors", tmp_path / "out", [])
    card = (tmp_path / "out" / "card.md").read_text()
    assert "no results for these weights" in card
    assert "test accuracy" not in card
    assert "| precision | not recorded |" in card
    assert ("| recipe | not recorded;" in card) or damage is _age_results
    assert ("| git commit | not recorded |" in card) or damage is _age_results


PIPELINES: dict[str, Any] = {
    "light": {"kind": "light"},
    "grey": {"kind": "none", "raw_shape": (1, 28, 28), "mean": (0.3,), "std": (0.4,)},
    "larger": {"kind": "imagenet", "image_size": 56},
    "smaller": {"kind": "imagenet", "image_size": 32, "raw_shape": (3, 96, 96)},
    "a test size": {"kind": "resized-crop", "image_size": 48, "raw_shape": (3, 96, 96), "training_sizes": ((0, 32),)},
    "only cropped": {"kind": "imagenet", "image_size": 56, "raw_shape": (3, 64, 64)},
}


@pytest.mark.parametrize("case", PIPELINES)
def test_preprocessing_is_complete(case: str, picture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that reads only preprocessing.json makes the inputs of our own evaluation."""
    plain = Pipeline("none", 0, (3, 32, 32), 224, False, 0, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    pipeline = replace(plain, **PIPELINES[case])
    described = describe_preprocessing(pipeline)
    monkeypatch.chdir(picture.parent)
    Path("preprocessing.json").write_text(json.dumps(described))
    names: dict[str, Any] = {}
    exec(PREPARE_IMAGE, names)
    sample = read_picture(picture, pipeline.raw_shape[1])[None]
    if pipeline.raw_shape[0] == 1:
        sample = sample.float().mean(1, keepdim=True).round().to(torch.uint8)
    ours = pipeline.for_evaluation(sample)
    assert names["inputs"].shape == (1, *described["input_shape"])
    assert np.allclose(names["inputs"], ours.numpy(), atol=1e-5)
    low, high = np.array(described["value_range"]).T.reshape(2, 1, -1, 1, 1)
    assert ((names["inputs"] > low - 1e-4) & (names["inputs"] < high + 1e-4)).all()


def test_vectors_are_not_changed() -> None:
    described = describe_preprocessing(Pipeline("none", 0, (784,), 224, False, 0, (), ()))
    assert (described["kind"], described["input_shape"], described["layout"]) == ("vector", [784], "NC")


WRONG = {
    "no format": ([], ["--format is missing", "torchscript"]),
    "unknown format": (["--format", "onx"], ["format: 'onx' is not valid", "--format onnx"]),
    "no value": (["--format"], ["--format needs a value"]),
    "unknown flag": (["--fromat", "onnx"], ["unknown flag '--fromat'", "perhaps you meant --format"]),
    "two runs": (["other", "--format=onnx"], ["unexpected argument 'other'"]),
    "not a run": (["--format=onnx"], ["not a run folder"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_words(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, parts = WRONG[case]
    assert main(["export", str(tmp_path), *words]) == 2
    screen = capsys.readouterr().err
    assert screen.startswith("error: ")
    assert all(part in screen for part in parts), screen


def test_checks_need_no_torch(tmp_path: Path) -> None:
    probe = (
        "import sys; from paceline.cli.main import main; main(['export', 'x', '--format=onnx']); print(*sys.modules)"
    )
    modules = command(sys.executable, "-c", probe, cwd=tmp_path).out.split()
    assert "paceline.cli.evaluate" in modules
    assert "torch" not in modules
    assert set(fields_of(Export)["format"].choices) == set(FORMATS)


def test_nothing_is_replaced_without_a_flag(
    exports: dict[str, Answer], run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exports["safetensors"].code == 0
    words = ["export", str(run_folder), "--format", "safetensors"]
    assert main(words) == 2
    assert "exists already" in capsys.readouterr().err
    (tmp_path / "keep.txt").write_text("mine")
    assert main([*words, "--output", str(tmp_path), "--force"]) == 2
    assert "not an export" in capsys.readouterr().err
    old = shutil.copytree(run_folder / "export-safetensors", tmp_path / "old")
    (old / "stale.txt").touch()
    assert main([*words, "--output", str(old), "--force"]) == 0
    assert {path.name for path in old.iterdir()} == {*FILES, "model.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == {"keep.txt", "old"}


def test_a_file_with_other_logits_is_not_kept(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget(model: Any, blank: Any, example: Any, file: Path) -> Any:
        file.write_bytes(b"")
        return Loaded(blank)

    monkeypatch.setitem(FORMATS, "torchscript", replace(FORMATS["torchscript"], write=forget))
    with pytest.raises(PacelineError, match="does not give the run's logits"):
        export_run(run_folder, "torchscript", tmp_path / "out", [])
    assert list(tmp_path.iterdir()) == []


def test_onnx_names_the_packages_to_install(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert main(["export", str(run_folder), "--format", "onnx"]) == 2
    assert how_to_install("onnx") in capsys.readouterr().err
    with pytest.raises(UserError) as caught:
        load_run(run_folder).export("onnx")
    assert caught.value.hint == how_to_install("onnx")


def test_onnx_has_the_same_logits(
    run_folder: Path,
    opened: OpenRun,
    picture: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    need_packages("onnx", "onnxruntime", "onnxscript")
    answer = paceline(*("export", str(run_folder), "--format=onnx"), cwd=run_folder.parent, PYTHONWARNINGS="error")
    assert answer.code == 0, answer
    assert answer.err == ""
    assert "loaded again" in answer.out
    assert "written by torch.export" in answer.out
    assert_snippet_labels_as_we_do(run_folder / "export-onnx", picture, opened, monkeypatch, capsys)


@pytest.mark.parametrize("reason", ["missing", "fails"])
def test_onnx_by_the_older_exporter_has_a_note(
    reason: str, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    need_packages("onnx", "onnxruntime", *(["onnxscript"] if reason == "fails" else []))

    def fail(*_: object) -> None:
        raise RuntimeError("no such operator")

    if reason == "missing":
        monkeypatch.setitem(sys.modules, "onnxscript", None)
    else:
        monkeypatch.setattr("paceline.training.export._write_onnx_by_dynamo", fail)
    assert main(["export", str(run_folder), "--format=onnx", "--output", str(tmp_path / "out")]) == 0
    note = {"missing": "needs the package onnxscript", "fails": "no such operator"}[reason]
    for text in (capsys.readouterr().out, (tmp_path / "out" / "card.md").read_text()):
        assert "loaded again" in text
        assert f"older exporter: the newer one {'fails with ' if reason == 'fails' else ''}" in text
        assert note in text


def test_onnx_without_its_runtime_is_checked_less_with_a_note(
    run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    need_packages("onnx")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert main(["export", str(run_folder), "--format=onnx", "--output", str(tmp_path / "out")]) == 0
    assert "checked by onnx.checker only" in capsys.readouterr().out
    assert "checked by onnx.checker only" in (tmp_path / "out" / "card.md").read_text()
