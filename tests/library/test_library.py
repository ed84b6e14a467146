"""Paceline from Python: the guide, the example and the notebook run, and give the results of the command line."""

from __future__ import annotations

import importlib
import importlib.util
import json
import linecache
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import paceline
from harness.cells import read_cells
from harness.cli import Answer, command
from harness.cli import paceline as run_command
from paceline.checkpoints.identity import refuse_early
from paceline.errors import CheckpointError, DataError, UserError, error_from_json
from paceline.library.functions import write_down
from paceline.library.run_inputs import RunInputs
from paceline.metrics.recorder import read_rows
from paceline.runs.folder import RunFolder
from paceline.runs.place import RunPlace
from paceline.settings.schema import flatten
from paceline.training.objective import Objective, UserFunction

train_module = importlib.import_module("paceline.library.train")
ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "custom_model"
FLAGS = ["--global-batch-size", "48", "--base-lr", "0.2", "--augment", "none", "--processes", "2", "--epochs", "1"]


def run_cells(path: Path, cwd: Path) -> Answer:
    code = f"from harness.cells import main; main({str(path)!r})"
    return command(sys.executable, "-c", code, cwd=cwd, PYTHONPATH=str(ROOT / "tests"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> paceline.Run:
    """examples/custom_model by its script, with its own model, data, loss and metrics."""
    folder = tmp_path_factory.mktemp("library") / "run"
    answer = command(
        sys.executable, str(EXAMPLE / "train.py"), "--epochs", "1", "--output-dir", str(folder), cwd=folder.parent
    )
    assert answer.code == 0, answer.err
    assert " is " in answer.out.splitlines()[-1]
    return paceline.load_run(folder)


def test_importing_paceline_imports_neither_torch_nor_the_library() -> None:
    code = "import sys, paceline; sys.exit(any(m == 'torch' or m.startswith('paceline.library') for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_example_and_its_command_line_train_the_same_bits(trained: paceline.Run, tmp_path: Path) -> None:
    answer = run_command(
        *("train", "shapes-cnn", "--model-name", "model.py:build", "--dataset", "data.py:make_stripes"),
        *("--loss", "loss.py:focal", "--metrics", "metric.py:top_2", "metric.py:confidence"),
        *(*FLAGS, "--output-dir", str(tmp_path / "run")),
        cwd=EXAMPLE,
    )
    assert answer.code == 0, answer.err
    other = paceline.load_run(tmp_path / "run")
    for name in ("weights_sha256", "test_loss", "test_metrics"):
        assert other.results[name] == trained.results[name]
    own = ("top_2", "confidence")
    shown = "".join(f" {name} {value:.4f}" for name, value in trained.metrics("val")[-1].items() if name in own)
    assert shown.startswith(" top_2")
    assert shown in answer.out


def test_a_metric_is_the_mean_over_every_sample_and_the_users_loss_is_used(trained: paceline.Run) -> None:
    _, labels, logits = answers_of(trained)
    likeliest = logits.topk(2).indices
    expected = (likeliest == labels[:, None]).any(1).double().mean().item()
    assert trained.results["test_metrics"]["top_2"] == expected
    assert trained.metrics("test")[0]["top_2"] == expected
    surprise = torch.nn.functional.cross_entropy(logits, labels, reduction="none").double()
    focal = (1 - (-surprise).exp()) ** 2 * surprise
    # Batches of other sizes, so the last bits of float32 differ.
    assert trained.results["test_loss"] == pytest.approx(focal.mean().item(), rel=1e-5)
    assert trained.evaluate().metrics["top_2"] == expected


def test_a_users_metrics_are_on_the_runs_page(trained: paceline.Run) -> None:
    page = (trained.path / "report.html").read_text()
    specs = json.loads(page.partition('id="chart-specs">')[2].partition("</script>")[0])
    charts = {spec["id"]: spec for spec in specs}
    for name in ("top_2", "confidence"):
        assert charts[f"own-{name}"]["title"] == f"{name} by epoch"
        (series,) = charts[f"own-{name}"]["series"]
        assert series["y"] == [float(f"{row[name]:.7g}") for row in trained.metrics("val")]  # like every chart
        assert f"test {name}" in page


def answers_of(run: paceline.Run) -> tuple[np.ndarray, torch.Tensor, torch.Tensor]:
    """The test half, and the model's logits for it."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        make_stripes = importlib.import_module("data").make_stripes
    finally:
        sys.path.remove(str(EXAMPLE))
    _, (images, labels), _ = make_stripes(seed=run.config.train.seed)
    probabilities = [list(answer.probabilities.values()) for answer in run.predict(images)]
    return images, torch.tensor(labels), torch.tensor(probabilities).log()


def test_predictions_do_not_depend_on_the_form_of_an_image(trained: paceline.Run, tmp_path: Path) -> None:
    array = answers_of(trained)[0][:3]
    expected = trained.predict(array)
    assert all(answer.probabilities[answer.label] == answer.probability for answer in expected)
    assert all(answer.probability == max(answer.probabilities.values()) for answer in expected)
    assert trained.predict(array.transpose(0, 3, 1, 2)) == expected
    assert trained.predict(torch.from_numpy(array)) == expected
    pictures = [Image.fromarray(image[..., 0]) for image in array]
    assert trained.predict(pictures) == expected
    for number, picture in enumerate(pictures):
        picture.save(tmp_path / f"{number}.png")
    assert trained.predict(sorted(tmp_path.glob("*.png"))) == expected
    assert trained.predict(str(tmp_path / "0.png")) == expected[:1]
    assert trained.predict([]) == []
    assert len(trained.predict(Image.new("RGB", (40, 30)))) == 1  # cropped and scaled
    assert trained.predict(array[0]) == trained.predict(array[0, :, :, 0]) == expected[:1]
    assert trained.predict(array[..., 0]) == trained.predict(list(array[..., 0])) == expected
    for wrong in (array / 255, array[0] / 255, array[0, 0, 0], 3):
        with pytest.raises(UserError, match="image"):
            trained.predict(wrong)  # type: ignore[arg-type]


def test_the_weights_stay_loaded_until_there_are_better_ones(
    trained: paceline.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `run.resume`, the same object does not predict with the weights from before."""
    image = answers_of(trained)[0][:1]
    run = paceline.Run(shutil.copytree(trained.path, tmp_path / "run", symlinks=True), trust_code=True)
    opened: list[str | int] = []
    predictions = importlib.import_module("paceline.library.predictions")
    real = predictions.open_model
    monkeypatch.setattr(predictions, "open_model", lambda *a, **k: opened.append(a[1]) or real(*a, **k))
    assert run.predict(image) == run.predict(image) == trained.predict(image)
    assert len(opened) == 1
    best = run.path / "checkpoints" / "best"
    other = best.resolve().rename(best.resolve().with_name("step-00000002"))
    best.unlink()
    best.symlink_to(other.name)
    assert run.predict(image) == trained.predict(image)
    assert len(opened) == 2


def test_the_model_is_ready_to_use_and_keeps_the_random_state(trained: paceline.Run) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    model = trained.model()
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training
    assert all(p.device.type == "cpu" for p in model.parameters())
    weights = model.state_dict()
    for name in ("latest", 22, "step-00000022"):
        again = trained.model(name).state_dict()
        assert all(torch.equal(again[key], value) for key, value in weights.items())
    with pytest.raises(UserError) as caught:
        trained.model(7)
    assert caught.value.allowed == "best, latest, 22"


def test_metrics_are_rows_that_other_tables_accept(trained: paceline.Run) -> None:
    rows = trained.metrics()
    kept = [row for row in read_rows(trained.path / "metrics.jsonl") if row["kind"] == "epoch"]
    assert list(rows) == [{name: value for name, value in row.items() if name not in ("kind", "ranks")} for row in kept]
    assert rows.column("phase") == ["train", "val", "test"]
    assert rows.columns[:4] == ["step", "epoch", "phase", "loss"]
    assert trained.metrics("step").column("step") == [10, 20, 22]
    assert repr(rows).splitlines()[0].split() == rows.columns
    assert rows._repr_html_().count("<tr>") == 4
    with pytest.raises(UserError, match="no such phase"):
        trained.metrics("validation")
    with pytest.raises(UserError, match="no column"):
        rows.column("top_3")


def test_a_table_becomes_a_dataframe_if_pandas_is_installed(trained: paceline.Run) -> None:
    rows = trained.metrics()
    if importlib.util.find_spec("pandas") is None:
        with pytest.raises(UserError) as caught:
            rows.to_pandas()
        assert caught.value.hint == "pip install pandas"
        return
    import pandas

    for frame in (pandas.DataFrame(rows), rows.to_pandas()):
        assert list(frame.columns) == rows.columns
        assert frame["loss"].tolist() == rows.column("loss")


def test_a_run_resumes_only_with_its_own_loss_and_with_any_metrics(trained: paceline.Run) -> None:
    with pytest.raises(CheckpointError) as caught:
        trained.resume(loss=f"{EXAMPLE}/metric.py:confidence")
    assert "loss: saved" in caught.value.screen()
    now = {**flatten(trained.config), "metrics": ()}
    refuse_early(trained.path, now)


def test_runs_are_found_by_a_prefix_of_their_name(trained: paceline.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = trained.path.parent / "runs"
    runs.mkdir()
    (runs / "first-linked").symlink_to(trained.path)
    monkeypatch.chdir(trained.path.parent)
    assert paceline.load_run("first").results == trained.results
    with pytest.raises(UserError, match="not a run folder"):
        paceline.load_run("second")


def inside() -> object:
    table = object()

    def build() -> object:
        return table

    return build


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"epoch": 3}, "perhaps you meant epochs"),
        ({"epochs": "many"}, "epochs: 'many' is not valid"),
        ({"epochs": 0}, "1 or more"),
        ({"epochs": [1, 2]}, "a whole number"),
        ({"amp": "yes"}, "True or False"),
        ({"recipe": "shape-cnn"}, "paceline train shapes-cnn"),
        ({"global_batch_size": 250, "processes": 4}, "250 is not divisible by 4"),
        ({"model": inside()}, "'table' cannot be written"),
        ({"model": "cnn", "model_name": "mlp"}, "model is given twice"),
        ({"loss": "nowhere.py:loss"}, "no such file"),
        ({"loss": f"{EXAMPLE}/loss.py:focul"}, "did you mean"),
        ({"loss": f"{EXAMPLE}/loss.py:focal", "label_smoothing": 0.1}, "in the loss itself"),
        ({"metrics": [f"{EXAMPLE}/metric.py:top_2"] * 2}, "two columns named 'top_2'"),
    ],
)
def test_mistakes_are_reported_before_the_start(
    settings: dict[str, object], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        paceline.train(**settings)  # type: ignore[arg-type]
    assert words in caught.value.screen()
    assert f"error: {caught.value}" == caught.value.screen()
    assert list(tmp_path.iterdir()) == []


def test_a_plan_has_the_numbers_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is written, and a mistake raises the error of the training."""
    monkeypatch.chdir(tmp_path)
    flags: dict[str, Any] = {"num_samples": 640, "global_batch_size": 64, "epochs": 3, "processes": 1}
    plan = paceline.plan("shapes-cnn", **flags)
    assert (plan.steps_per_epoch, plan.total_steps, plan.world_size) == (9, 27, 1)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError):
        paceline.plan("shapes-cnn", epoch=3)
    with pytest.raises(UserError):
        paceline.plan("shapes-cnn", **{**flags, "num_samples": 60})


def test_a_rank_that_imports_the_script_does_not_train_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="this process already is a rank"):
        paceline.train()


def test_the_return_value_of_a_function_is_checked() -> None:
    logits, labels = torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)
    loss = Objective(loss=UserFunction("mine.py:loss", lambda logits, labels: logits.sum(0), may_be_mean=True))
    with pytest.raises(UserError, match=r"mine.py:loss returns something else") as caught:
        loss.mean_loss(logits, labels)
    assert caught.value.got == "a tensor of shape [3]"
    assert caught.value.allowed == "one value per sample, a dense tensor of shape [4], or their mean"
    metric = Objective(metrics={"mean": UserFunction("mine.py:mean", lambda logits, labels: logits.mean())})
    with pytest.raises(UserError, match=r"mine.py:mean returns"):
        metric.sums(logits, labels)
    broken = Objective(loss=UserFunction("mine.py:loss", lambda logits, labels: logits[:, 7], may_be_mean=True))
    with pytest.raises(UserError, match=r"mine.py:loss failed") as caught:
        broken.mean_loss(logits, labels)
    assert Path(__file__).name in str(caught.value.where)


def test_errors_of_the_command_are_raised(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.create()
    with folder.owned(), pytest.raises(UserError) as caught:
        paceline.train(output_dir=folder.path, quiet=True)
    assert str(folder.path) in caught.value.screen()
    assert caught.value.exit_code == 2


def test_an_error_of_a_child_keeps_its_fields() -> None:
    for error in (
        UserError("all of it", where="here", got="two\nlines", allowed="one", hint="try: this"),
        DataError("nothing but what"),
        CheckpointError("with a hint", hint="again"),
    ):
        read = error_from_json(json.loads(json.dumps(error.to_json())))
        assert type(read) is type(error)
        assert vars(read) == {**vars(error), "exit_code": error.exit_code}


# --- Notebooks


@pytest.mark.parametrize("kind", ["link", "own file"])
def test_functions_of_a_notebook_overwrite_no_foreign_files(kind: str, tmp_path: Path) -> None:
    """Neither through a link nor a file that belongs to no run."""
    mine = tmp_path / "mine.py"
    mine.write_text("mine = 1\n")
    file = tmp_path / "run" / "functions.py"
    file.parent.mkdir()
    if kind == "link":
        file.symlink_to(mine)
    else:
        file.write_text("mine = 1\n")
    with pytest.raises(UserError):
        RunInputs(file.parent).write_source("theirs = 2\n")
    assert file.read_text() == mine.read_text() == "mine = 1\n"


def test_a_refused_call_keeps_the_functions_of_a_run(
    notebook: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restart of that run would read them."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    RunFolder(run).config.write_text("epochs: 1\n")
    (run / "functions.py").write_text("before = 1\n")
    type_in(notebook, "def loss(logits, labels):\n    return logits.sum()\n")

    def refuse(*_: object, **__: object) -> None:
        assert "def loss" in (run / "functions.py").read_text()
        raise UserError("refused")

    monkeypatch.setattr(train_module, "train_in_child", refuse)
    monkeypatch.setattr(train_module, "check_call", lambda *_: RunPlace(run, None))
    with pytest.raises(UserError):
        paceline.train(output_dir=run, loss=notebook["loss"], quiet=True)  # type: ignore[arg-type]
    assert (run / "functions.py").read_text() == "before = 1\n"


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The namespace of a `__main__` that replaces a notebook's."""
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    return vars(main)


def type_in(namespace: dict[str, object], source: str) -> None:
    name = f"<typed in {len(namespace)}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), namespace)


def test_functions_of_a_notebook_are_written_with_all_that_they_use(notebook: dict[str, object]) -> None:
    type_in(notebook, "import math as m\nfrom json import dumps as write\nWIDTH = 3\nunused = object()\n")
    type_in(notebook, "class Net:\n    unused = 1\n    def size(self):\n        return WIDTH * helper(2)\n")
    type_in(notebook, "def helper(x):\n    unused = m.floor(x)\n    return unused\n")
    type_in(notebook, "def build(net: Net):\n    return write(net.size())\n")
    text = write_down([notebook["build"]])  # type: ignore[list-item]
    fresh: dict[str, object] = {}
    exec(text, fresh)
    assert fresh["build"](fresh["Net"]()) == "6"  # type: ignore[operator]
    assert "unused" not in fresh


def test_functions_without_source_are_refused_by_name(notebook: dict[str, object]) -> None:
    type_in(notebook, "table = object()\ndef build():\n    return table\n")
    with pytest.raises(UserError, match="'table'") as caught:
        write_down([notebook["build"]])  # type: ignore[list-item]
    assert "needed by build" in caught.value.screen()
    exec("def typed_at_a_prompt():\n    return 1\n", notebook)
    with pytest.raises(UserError, match="source of typed_at_a_prompt is not known"):
        write_down([notebook["typed_at_a_prompt"]])  # type: ignore[list-item]


def test_cells_of_the_notebook_run(tmp_path: Path) -> None:
    path = ROOT / "examples" / "notebook" / "paceline.ipynb"
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] for cell in cells if "print" in "".join(cell["source"]))
    assert not any(output["output_type"] == "error" for cell in cells for output in cell["outputs"])
    small = tmp_path / "small.ipynb"
    small.write_text(
        path.read_text().replace("epochs=10", "epochs=1, track=()").replace("num_samples=2500", "num_samples=640")
    )
    answer = run_cells(small, tmp_path)
    assert answer.code == 0, answer.err
    assert "data      shapes: 576 train" in answer.out
    assert "code      build, top_3, written to" in answer.out


@pytest.mark.long
def test_guide_runs_from_top_to_bottom(tmp_path: Path) -> None:
    assert len(read_cells(ROOT / "docs" / "guides" / "library.md")) >= 5
    guide = (ROOT / "docs" / "guides" / "library.md").read_text()
    small = tmp_path / "small.md"
    small.write_text(guide.replace("global_batch_size=100", "global_batch_size=100, track=()"))  # TensorBoard is slow
    answer = run_cells(small, tmp_path)
    assert answer.code == 0, answer.err
    screen = answer.out[answer.out.index("error: unknown key") :].partition("\nfinished")[0]
    assert screen in guide
