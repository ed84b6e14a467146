"""Recipes, sites, parameters, studies and the course: text files that users exchange."""

from __future__ import annotations

import shutil
from pathlib import Path

from fuzz.mutations import OUTSIDE, mutate_csv, mutate_json, mutate_yaml
from fuzz.run_formats import CHECKPOINTS, COMPARE, LIBRARY, LIST, PAGE, STATUS, build_finished
from fuzz.sandbox import Format, Reader
from paceline.cli.command import run_verb
from paceline.integrations.runnable.parameters import make_request, read_parameters
from paceline.integrations.slurm.prepare import read_site
from paceline.launch.request import check_loaded
from paceline.settings.load import load_config
from paceline.settings.recipe_file import find_recipe
from paceline.settings.rules import check_config
from paceline.tools.course.lessons import read_passed

SITE = """\
default:
  partition: gpu
  account: abc
  cpus-per-task: 2
  modules: [cuda, python]
  env: {A: '1', B: two}
big:
  partition: big
"""
PARAMETERS = "recipe: synthetic-mlp\nworld_size: 1\nbatch_size: 32\nlearning_rate: 0.1\nepochs: 1\nmetrics: []\n"


def _build_recipe(samples: Path, folder: Path) -> None:
    shutil.copyfile(find_recipe("shapes-cnn"), folder / "recipe.yaml")


def _load(folder: Path) -> None:
    loaded = load_config("recipe.yaml", ["--epochs", "2"])
    check_config(loaded)
    check_loaded(loaded)


def _build_site(samples: Path, folder: Path) -> None:
    (folder / "sites.yaml").write_text(SITE)


def _site(folder: Path) -> None:
    read_site(None, {"PACELINE_SITES": str(folder / "sites.yaml")})


def _build_parameters(samples: Path, folder: Path) -> None:
    (folder / "parameters.yaml").write_text(PARAMETERS)


def _parameters(folder: Path) -> None:
    parameters = read_parameters("parameters.yaml", {})
    recipe = parameters.get("recipe")
    if recipe is None or OUTSIDE not in str(recipe.value):  # a user may name any file as the recipe
        make_request(parameters)


def _build_study(samples: Path, folder: Path) -> None:
    """Two cells of one study: the files of `paceline study`, with the samples as its runs."""
    from paceline.runs.folder import write_json
    from paceline.tools.study.collect import collect, write_csv
    from paceline.tools.study.grid import CELLS, StudySpec, write_spec

    spec = StudySpec("shapes-cnn", "s", (), (1, 2), ("ddp",), 1, "strong", 16)
    home = folder / "study"
    write_spec(home, spec)
    for cell, name in zip(spec.cells(), ("one", "two"), strict=True):
        shutil.copytree(samples / "runs" / name, home / CELLS / cell.name, symlinks=True)
        write_json(home / CELLS / f"{cell.name}.json", {"code": 0, "wall_s": 2.5, "words": ""})
    write_csv(home / "results.csv", collect(home, spec))


REPORT = Reader("study report", lambda folder: run_verb("study", ["report", "study"]), every=50)
PREDICT = Reader("study predict", lambda folder: run_verb("study", ["predict", "study", "--world-sizes", "4,8"]))
PREDICT_CSV = Reader(
    "study predict results.csv",
    lambda folder: run_verb("study", ["predict", "study/results.csv", "--world-sizes", "4"]),
)


def _build_course(samples: Path, folder: Path) -> None:
    desk = folder / "course-work"
    desk.mkdir()
    (desk / "progress.json").write_text('{"passed": {"1": "2026-01-01 10:00", "2": "2026-01-02 10:00"}}')


def _study_file(name: str, *readers: Reader) -> Format:
    return Format(f"study/{name}", _build_study, f"study/{name}", mutate_json, readers)


FORMATS = (
    Format("recipe", _build_recipe, "recipe.yaml", mutate_yaml, (Reader("train", _load, every=4),)),
    Format(
        "run/config.yaml",
        build_finished,
        "runs/one/config.yaml",
        mutate_yaml,
        (LIST, STATUS, *(Reader(r.name, r.call, every=40) for r in (PAGE, COMPARE, LIBRARY)), CHECKPOINTS),
    ),
    Format("site", _build_site, "sites.yaml", mutate_yaml, (Reader("submit", _site),)),
    Format(
        "runnable/parameters.yaml",
        _build_parameters,
        "parameters.yaml",
        mutate_yaml,
        (Reader("a flow's first step", _parameters, every=10),),
    ),
    _study_file("study.json", PREDICT, REPORT),
    _study_file("cells/ddp-1-r1.json", PREDICT, REPORT),
    _study_file("cells/ddp-1-r1/results.json", PREDICT, REPORT),
    Format("study/results.csv", _build_study, "study/results.csv", mutate_csv, (PREDICT_CSV,)),
    Format(
        "course/progress.json",
        _build_course,
        "course-work/progress.json",
        mutate_json,
        (Reader("course", lambda folder: read_passed()),),
    ),
)
