"""One parser and one conversion for every source: command line, recipe, site profile, Python call."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal, cast

import pytest

from paceline.checkpoints.identity import SILENT, require_same_run
from paceline.checkpoints.store import Checkpoint
from paceline.cli.command import commands_of
from paceline.cli.main import VERBS
from paceline.errors import UserError
from paceline.integrations.slurm.prepare import read_site
from paceline.library.call import as_settings
from paceline.settings.command_line import arguments_of, help_text, parse_command, usage
from paceline.settings.declare import Arg, FlagsOf, Range, collected_by, fields_of
from paceline.settings.load import load_config, load_saved
from paceline.settings.schema import Config, field_table, flatten
from paceline.settings.values import RENAMED, Setting


@dataclass(frozen=True)
class Example:
    """Do something."""

    run: Annotated[str, Arg(place="word")]
    """A run."""
    more: Annotated[tuple[str, ...], Arg(place="word")] = ()
    """Other words."""
    count: Annotated[int, Range(low=1, high=9), Arg(aliases=("number",))] = 3
    """How many."""
    size_mb: float = 1.5
    """How large."""
    fast: bool = True
    """Quickly."""
    kind: Literal["small", "large"] = "small"
    """Which."""
    modules: Annotated[tuple[str, ...], Arg(many="commas")] = ()
    """Modules."""
    sizes: Annotated[tuple[int, ...], Range(low=1), Arg(many="commas")] = ()
    """Sizes."""
    lines: Annotated[tuple[str, ...], Arg(many="lines", may_begin_with_dashes=True)] = ()
    """Lines."""
    page: Annotated[Path | None, Arg(bare="page.html", bare_unless=(".html",))] = None
    """A page."""
    limit: int | None = None
    """At most."""
    options: Annotated[tuple[str, ...], Arg(place="rest")] = ()
    flags: Annotated[tuple[Setting, ...], FlagsOf(Config)] = ()


def parse(*arguments: str) -> Example:
    return parse_command(arguments, Example, "example")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["a"], Example("a")),
        (["a", "b", "--count", "4", "c"], Example("a", ("b", "c"), count=4)),
        (["--number=5", "a"], Example("a", count=5)),
        (["a", "--count=4", "--count=6"], Example("a", count=6)),
        (["a", "--no-fast", "--kind", "large"], Example("a", fast=False, kind="large")),
        (["a", "--no-fast", "--fast"], Example("a")),
        (["a", "--modules", "x,y", "--modules=z"], Example("a", modules=("x", "y", "z"))),
        (["a", "--sizes", "1, 2 ,3"], Example("a", sizes=(1, 2, 3))),
        (["a", "--lines", "--x=1,2", "--lines=b"], Example("a", lines=("--x=1,2", "b"))),
        (["a", "--page", "b"], Example("a", ("b",), page=Path("page.html"))),
        (["a", "--page", "b.html"], Example("a", page=Path("b.html"))),
        (["a", "--page=b"], Example("a", page=Path("b"))),
        (["a", "--size_mb", "1e3", "--limit", "-2"], Example("a", size_mb=1000.0, limit=-2)),
        (["a", "--", "--count", "-x"], Example("a", options=("--count", "-x"))),
    ],
)
def test_arguments_become_settings(arguments: list[str], expected: Example) -> None:
    assert parse(*arguments) == expected


def test_flags_of_another_dataclass_are_collected_with_their_origin() -> None:
    (setting,) = parse("a", "--epochs", "7").flags
    assert (setting.field.name, setting.values, setting.where) == ("epochs", ("7",), "flag --epochs")


@pytest.mark.parametrize(
    ("arguments", "where", "parts"),
    [
        ([], "the command line", ["RUN is missing", "paceline example RUN"]),
        (["a", "--cuont", "3"], "the command line", ["unknown flag '--cuont'", "--count"]),
        (["a", "-c", "3"], "the command line", ["unknown flag '-c'"]),
        (["a", "--count"], "the command line", ["--count needs a value", "from 1 up to 9"]),
        (["a", "--count", "--fast"], "the command line", ["--count needs a value"]),
        (["a", "--count", "many"], "flag --count", ["count: 'many' is not valid", "a whole number"]),
        (["a", "--count", "10"], "flag --count", ["count is out of range", "from 1 up to 9"]),
        (["a", "--size-mb", "nan"], "flag --size-mb", ["out of range"]),
        (["a", "--limit", "9" * 30], "flag --limit", ["30 digits", "2**63"]),
        (["a", "--limit", "9" * 5000], "flag --limit", ["is not valid"]),
        (["a", "--fast=yes"], "the command line", ["--fast takes no value", "--no-fast"]),
        (["a", "--no-count"], "the command line", ["unknown flag '--no-count'"]),
        (["a", "--kind", "lagre"], "flag --kind", ["kind: 'lagre'", "small, large", "--kind large"]),
        (["a", "--page="], "the command line", ["needs a value after ="]),
        (["a", "--modules", "x\ny"], "flag --modules", ["a newline"]),
        (["a", "--sizes", "1,,2"], "flag --sizes", ["sizes: '' is not valid"]),
        (["a", "--save-frequency", "2"], "the command line", ["new name", "--keep-every-epochs"]),
    ],
)
def test_a_mistake_is_named_with_its_origin(arguments: list[str], where: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        parse(*arguments)
    assert caught.value.where == where
    for part in parts:
        assert part in caught.value.screen()


def test_settings_converted_to_arguments_give_the_same_settings() -> None:
    arguments = ["--count=4", "--no-fast", "--modules=x,y", "--lines=--z", "--page", "--limit=2"]
    settings = parse("a", *arguments)
    assert arguments_of(settings) == [argument.replace("--page", "--page=page.html") for argument in arguments]
    assert parse("a", *arguments_of(settings)) == settings


def test_every_source_has_the_same_conversion(tmp_path: Path) -> None:
    """The same wrong value from each source: the same message, and its origin."""
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("# mine\nepochs: 0\n")
    sources = {
        "flag --epochs": lambda: load_config("shapes-cnn", ["--epochs", "0"]),
        f"{recipe}, line 2": lambda: load_config(str(recipe)),
        "paceline.train(epochs=...)": lambda: load_config("shapes-cnn", as_settings({"epochs": 0}, recipe)),
        f"{tmp_path}, epochs": lambda: load_saved({"epochs": 0}, tmp_path),
    }
    screens = set()
    for where, load in sources.items():
        with pytest.raises(UserError) as caught:
            load()
        assert caught.value.where == where
        screens.add((caught.value.what, caught.value.got, caught.value.allowed))
    assert screens == {("epochs is out of range", 0, "a whole number, 1 or more")}


def test_a_site_profile_has_flags_of_a_job_with_their_lines(tmp_path: Path) -> None:
    sites = tmp_path / "sites.yaml"
    sites.write_text("default:\n  account: proj42\n  modules: [a, b/1]\n  env:\n    A: '1'\n")
    found = read_site(None, {"PACELINE_SITES": str(sites)})
    assert {name: setting.values for name, setting in found.items()} == {
        "account": ("proj42",),
        "modules": ("a", "b/1"),
        "env": ("A=1",),
    }
    assert found["modules"].where == f"{sites}, line 3"
    sites.write_text("default:\n  signal_notice: 60\n")
    with pytest.raises(UserError) as caught:
        read_site(None, {"PACELINE_SITES": str(sites)})
    assert "signal_notice_s" in caught.value.screen()


def test_recipes_must_use_new_names_and_old_runs_stay_readable(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("save_frequency: 2\n")
    with pytest.raises(UserError) as caught:
        load_config(str(tmp_path / "mine.yaml"))
    assert (caught.value.where, caught.value.hint) == (f"{tmp_path / 'mine.yaml'}, line 1", "keep_every_epochs")
    (tmp_path / "config.yaml").write_text("save_frequency: 2\nhang_timeout: 0.0  # default\nnotice: 5.0\n")
    loaded = load_config(str(tmp_path / "config.yaml"))
    assert (loaded.config.run.keep_every_epochs, loaded.config.guard.notice_s) == (2, 5.0)
    assert (loaded.origin("hang_timeout_s"), loaded.origin("notice_s")) == ("default", "file")
    assert load_saved({"save_frequency": 3}, tmp_path).config.run.keep_every_epochs == 3


def test_renamed_settings_exist_and_old_names_do_not() -> None:
    known = {name for verb in VERBS for command in commands_of(verb).values() for name in tables(command.settings)}
    assert set(RENAMED.values()) <= known
    assert not set(RENAMED) & known
    assert set(SILENT) <= set(field_table())


def tables(owner: type) -> set[str]:
    return {*fields_of(owner), *(name for other in collected_by(owner).values() for name in fields_of(other))}


@pytest.mark.parametrize("verb", VERBS)
def test_every_flag_has_help(verb: str) -> None:
    for name, command in commands_of(verb).items():
        text = help_text(command.settings, name)
        assert text.startswith(f"usage: {usage(command.settings, name)}\n")
        assert command.settings.__doc__
        fields = [field for field in fields_of(command.settings).values() if field.arg.many != "all"]
        missing = [field.name for field in fields if not field.help and field.arg.place != "rest"]
        assert missing == []
        assert all(len(line) <= 120 for line in text.splitlines())


def test_a_checkpoint_with_earlier_names_belongs_to_the_same_run() -> None:
    """Only the names differ. A value that differs is reported under its new name."""
    now = flatten(Config())
    old = {new: name for name, new in RENAMED.items()}
    saved = json.loads(json.dumps({old.get(name, name): value for name, value in now.items()}))
    assert "save_frequency" in saved

    def changed() -> list[str]:
        return require_same_run(cast(Checkpoint, SimpleNamespace(state={"config": saved})), now)

    assert changed() == []
    saved["save_frequency"] = 5
    assert changed() == ["keep_every_epochs"]
