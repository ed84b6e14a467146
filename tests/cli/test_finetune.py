"""`paceline train finetune --export FORMAT`: from a folder of pictures and a trained run to an exported model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

from harness.cli import paceline
from harness.runs import read_results

BACKBONE = ["shapes-cnn", "--num-samples=640", "--global-batch-size=64", "--processes=1", "--track", "--epochs=1"]
SMALL = ["--model-name=cnn", "--image-size=32", "--global-batch-size=8", "--processes=1", "--track"]


def write_pictures(folder: Path, classes: tuple[str, ...] = ("bright", "dark"), per_class: int = 20) -> Path:
    """Noise around a brightness that belongs to the class, in files of several shapes."""
    noise = np.random.default_rng(0)
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        brightness = np.uint8(170 * number // (len(classes) - 1 or 1))
        for index in range(per_class):
            pixels = noise.integers(0, 80, (40 + index, 50, 3), dtype=np.uint8) + brightness
            Image.fromarray(pixels).save(folder / name / f"{index}.png")
    return folder


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of pictures, and a run whose weights fit the model cnn."""
    folder = tmp_path_factory.mktemp("finetune")
    answer = paceline("train", *BACKBONE, "--output-dir=backbone", cwd=folder)
    assert answer.code == 0, answer
    write_pictures(folder / "pictures")
    return folder


@pytest.mark.long
def test_one_command_tests_exports_and_describes_a_model(workplace: Path) -> None:
    words = ["train", "finetune", "--data-dir=pictures", "--init-from=backbone", *SMALL, "--epochs=4"]

    answer = paceline(*words, "--export=safetensors", "--output-dir=tuned", cwd=workplace)

    assert answer.code == 0, answer
    run = workplace / "tuned"
    assert read_results(run)["test_accuracy"] == 1.0
    export = run / "export-safetensors"
    assert {path.name for path in export.iterdir()} >= {"model.safetensors", "card.md", "preprocessing.json"}
    card = (export / "card.md").read_text()
    assert "| started from | weights: backbone |" in card
    assert "| recipe | finetune |" in card
    assert json.loads((export / "labels.json").read_text()) == {"0": "bright", "1": "dark"}
    assert yaml.safe_load((run / "config.yaml").read_text())["weights"] == "none"  # nothing was downloaded
    again = paceline(*words, "--export=safetensors", "--output-dir=tuned", "--resume=auto", cwd=workplace)
    assert again.code == 0, again  # the export of the same run is replaced


@pytest.mark.long
def test_exported_weights_are_weights_to_start_from(workplace: Path) -> None:
    exported = paceline("export", "backbone", "--format=safetensors", "--output=weights", cwd=workplace)
    assert exported.code == 0, exported

    flags = ["--weights=weights/model.safetensors", "--max-steps=1", "--output-dir=from-file"]
    answer = paceline("train", "finetune", "--data-dir=pictures", *SMALL, *flags, cwd=workplace)

    assert answer.code == 0, answer
    assert read_results(workplace / "from-file")["steps"] == 1


@pytest.mark.long
def test_a_head_for_as_many_other_classes_is_left_out(workplace: Path) -> None:
    write_pictures(workplace / "ten", tuple("abcdefghij"), per_class=6)
    flags = ["--data-dir=ten", "--init-from=backbone", *SMALL, "--max-steps=1", "--output-dir=ten-classes"]

    answer = paceline("train", "finetune", *flags, cwd=workplace)

    assert answer.code == 0, answer
    assert "weights   8 of 10 tensors" in answer.out
    assert answer.out.count("other classes") == 2


@pytest.mark.parametrize(
    ("flags", "code", "part"),
    [
        (["--init-from=backbone", "--weights=imagenet"], 2, "one place"),
        (["--init-from=backbone", "--export=onxx"], 2, "onnx"),
        (["--init-from=backbone", "--export=safetensors", "--rehearse"], 2, "rehearsal"),
        (["--init-from=backbone", "--model-name=mlp"], 3, "does not belong to this model"),
        (["--init-from=backbone", "--data-dir=one-class"], 3, "one-class"),
        (["--init-from=backbone", "--data-dir=empty"], 3, "empty"),
        (["--init-from=nowhere"], 2, "nowhere"),
        (["--weights=nowhere.pth"], 3, "nowhere.pth"),
    ],
)
def test_bad_input_is_refused(workplace: Path, flags: list[str], code: int, part: str) -> None:
    if not (workplace / "empty").exists():
        (workplace / "empty").mkdir()
        write_pictures(workplace / "one-class", ("bright",))
    words = ["train", "finetune", "--data-dir=pictures", *SMALL, "--output-dir=refused", *flags]

    answer = paceline(*words, cwd=workplace)

    assert answer.code == code, answer
    assert part in answer.err
    assert "Traceback" not in answer.err


def test_export_is_refused_in_a_rank_of_another_launcher(workplace: Path) -> None:
    """Each rank would export, and only after the process group is gone."""
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    words = ["train", "finetune", "--data-dir=pictures", "--init-from=backbone", *SMALL, "--export=safetensors"]

    answer = paceline(*words, cwd=workplace, env={**ranks, **address})

    assert answer.code == 2, answer
    assert "paceline export RUN" in answer.err
