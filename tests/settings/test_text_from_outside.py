"""Text from users and files: what is refused, what survives a round trip, and what is safe to print."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import unicodedata
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline.errors import PacelineError, UserError, printable, printable_line
from paceline.integrations.slurm.prepare import read_site
from paceline.settings.load import load_config, to_yaml
from paceline.settings.schema import Config, field_table, flatten
from paceline.settings.small_files import parse_json, read_json_object
from paceline.settings.text import check_text, find_fault

REFUSED = [*map(chr, range(0x20)), *map(chr, range(0x7F, 0xA0)), *"\u2028\u2029\u202a\u202e\u2066\u2069\ud800\udcff"]
READ_FROM_FILES = ("exclude", "relabel")  # their text names a file, which is read at once
TEXT_FIELDS = [spec for spec in field_table().values() if spec.is_text and spec.name not in READ_FROM_FILES]
# An anchor of nine aliases, nine times: a third of a kilobyte that expands to four hundred million nodes.
ALIAS_BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)


def accepted_text() -> st.SearchStrategy[str]:
    """Drawn without refused characters: filters of many fields at once would discard most examples."""
    override = "".join(map(chr, [*range(0x202A, 0x202F), *range(0x2066, 0x206A)]))
    alphabet = st.characters(codec="utf-8", exclude_categories=("Cc", "Zl", "Zp"), exclude_characters=override)
    return st.text(alphabet, max_size=20).filter(lambda text: find_fault(text) is None)


@pytest.mark.parametrize("character", REFUSED, ids=lambda character: f"U+{ord(character):04X}")
def test_text_that_does_not_fit_on_one_line_is_refused(character: str) -> None:
    """Newlines, control characters, separators, bidirectional overrides and lone surrogates are refused."""
    with pytest.raises(UserError) as refused:
        check_text(f"a{character}b", "the name", where="flag --name")
    screen = refused.value.screen()
    assert character not in screen.replace("\n", "") if character == "\n" else character not in screen
    screen.encode()  # it can be printed and logged


def test_a_secret_is_not_repeated_in_the_refusal() -> None:
    """An error screen never shows a secret value."""
    with pytest.raises(UserError) as refused:
        check_text("hunter2\n", "the variable", is_secret=True)
    assert "hunter2" not in refused.value.screen()


@pytest.mark.parametrize("text", ["", " a ", "Käfer", "日本語", "😀", "a'b\"c", "#x: y", "\u00a0", "\u200f", "x\ufffe"])
def test_other_text_is_accepted(text: str) -> None:
    """Every language, emoji, quotes and blanks are accepted."""
    assert check_text(text, "the name") == text


@settings(max_examples=40)
@given(values=st.fixed_dictionaries({spec.name: accepted_text() for spec in TEXT_FIELDS if not spec.is_tuple}))
@example(values={spec.name: "x" for spec in TEXT_FIELDS if not spec.is_tuple})
def test_a_config_survives_a_round_trip_through_yaml(values: dict[str, str]) -> None:
    """to_yaml, then load: the same Config, for every accepted text in every text field."""
    assert_round_trip(config_with(dict(values)))


@settings(max_examples=40)
@given(texts=st.lists(accepted_text(), max_size=4))
@example(texts=["--epochs=3"])
@example(texts=["-x", ""])
def test_a_list_of_texts_survives_a_round_trip(texts: list[str]) -> None:
    """Values of a list that look like flags stay values."""
    assert_round_trip(config_with({"metrics": tuple(texts)}))


@pytest.mark.parametrize(
    "text",
    [
        *("1e3", "yes", "no", "~", "null", "0x10", "0o7", "1_000", "2026-11-16", ".inf", " a", "a ", "  ", "#", "a #b"),
        *("a: b", "-", "- a", "--epochs=3", "'", '"', "''", "\\", "\\n", "%", "@x", "`", "!", "!!str", "&a", "*a", "|"),
        *(">", "=", "<<", "{", "[a, b]", ",", "?", ":", "€", "😀", "\u00a0", "\u3000", "\ufeff", "x\ufffe", "\u200b"),
    ],
)
def test_texts_that_yaml_reads_as_something_else(text: str) -> None:
    """Numbers, booleans, dates, indicators and odd characters stay text."""
    assert_round_trip(config_with({"data_dir": text, "metrics": (text, text)}))


def config_with(values: dict[str, object]) -> Config:
    config = Config()
    for name, value in values.items():
        group = field_table()[name].group
        changed = dataclasses.replace(getattr(config, group), **{name: value})
        config = dataclasses.replace(config, **{group: changed})
    return config


def assert_round_trip(config: Config) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "again.yaml"
        path.write_text(to_yaml(config), encoding="utf-8")
        assert flatten(load_config(str(path), []).config) == flatten(config)


@pytest.mark.parametrize("character", ["\n", "\0", "\x1b", "\x85", "\u2028", "\u202e", "\udcff"])
@pytest.mark.parametrize("flag", ["--data-dir", "--output-dir", "--loss", "--metrics", "--resume"])
def test_flags_refuse_control_characters(flag: str, character: str) -> None:
    """Every text flag uses the same check."""
    with pytest.raises(UserError) as refused:
        load_config("shapes-cnn", [f"{flag}=a{character}b"])
    assert refused.value.where == f"flag {flag}"


@pytest.mark.parametrize("escape", [r"\n", r"\x1b", r"\e", r"\0", r"\x85", r"\u2028", r"\u202e"])
def test_recipes_refuse_escaped_control_characters(tmp_path: Path, escape: str) -> None:
    """Double quotes in YAML can contain any character. It is refused with its line."""
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f'epochs: 3\ndata_dir: "a{escape}b"\n')
    with pytest.raises(UserError) as refused:
        load_config(str(recipe), [])
    assert refused.value.where == f"{recipe}, line 2"


@pytest.mark.parametrize("name", ["a\nb.yaml", "a\x1b[31mb.yaml", "a\u202eb.yaml"])
def test_the_name_of_a_recipe_is_checked(tmp_path: Path, name: str) -> None:
    """A recipe's name becomes the name of a job and of a folder."""
    (tmp_path / name).write_text("epochs: 3\n")
    with pytest.raises(UserError, match="the name of the recipe"):
        load_config(str(tmp_path / name), [])


@pytest.mark.parametrize(
    "text",
    [
        ALIAS_BOMB + "track: *a8\n",
        ALIAS_BOMB.replace("a8:", "metrics:", 1),
        "metrics: &a [x]\n",
        "metrics: [&a x, *a]\n",
        "metrics: " + "[" * 50_000,
        "metrics: " + "[" * 1000 + "]" * 1000,
        "{" * 5000,
        "- " * 5000,
        "? " * 5000,
        "a:\n" + "".join(f"{' ' * n}a:\n" for n in range(1, 500)),
        "metrics: [[x]]\n",
        "metrics: [{a: b}]\n",
        "[a]: b\n",
        "{a: b}: c\n",
        "data_dir: !!python/object/apply:os.system [id]\n",
        "x" * 300_000,
    ],
    ids=lambda text: text[:20].replace("\n", " "),
)
def test_yaml_that_needs_too_much_memory_is_refused_at_once(tmp_path: Path, text: str) -> None:
    """Alias bombs, deep nesting and large files end with our own error, in recipes and in site files."""
    assert len(ALIAS_BOMB) < 500
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UserError):
        load_config(str(path), [])
    with pytest.raises(UserError):
        read_site("gpu", {"PACELINE_SITES": str(path)})


def test_a_recipe_that_is_not_a_regular_file_is_refused(tmp_path: Path) -> None:
    """A FIFO without a writer does not block the command."""
    os.mkfifo(tmp_path / "mine.yaml")
    with pytest.raises(UserError):
        load_config(str(tmp_path / "mine.yaml"), [])
    with pytest.raises(ValueError, match="regular"):
        read_json_object(tmp_path / "mine.yaml")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, "", "[]", "nope", "\xff", "NaN"])
def test_json_from_other_programs_raises_only_value_errors(tmp_path: Path, text: str) -> None:
    """Deep nesting, huge numbers, wrong types and broken encodings are all ValueError."""
    path = tmp_path / "some.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError):
        read_json_object(path)


def test_json_larger_than_its_limit_is_not_read(tmp_path: Path) -> None:
    """A file of the wrong size is refused before it is parsed."""
    (tmp_path / "some.json").write_text('{"a": 1}')
    assert read_json_object(tmp_path / "some.json", at_most_bytes=8) == {"a": 1}
    with pytest.raises(ValueError, match="larger"):
        read_json_object(tmp_path / "some.json", at_most_bytes=7)
    assert parse_json("[1]") == [1]


@given(st.text())
@example("\x1b]0;title\x07\x1b[2J\x9b31m\r\x08\u202e\udcff\ud800")
def test_printed_text_contains_no_control_characters(text: str) -> None:
    """Printed text has at most newlines and tabs. Printable text is unchanged."""
    for shown, kept in ((printable(text), "\n\t"), (printable_line(text), "")):
        refused = [c for c in shown if unicodedata.category(c) in ("Cc", "Zl", "Zp", "Cs") and c not in kept]
        assert refused == []
        assert not set(shown) & set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
        shown.encode()
    if find_fault(text) is None:
        assert printable(text) == printable_line(text) == text


def test_error_screens_are_safe_to_print() -> None:
    """Screens contain names from files and command lines. Their control characters are escaped."""
    screen = PacelineError("bad \x1b[31m", where="caf\udce9", got="a\x1b]0;t\x07", allowed="\x9b", hint="\r").screen()
    assert screen.split("\n")[0] == "error: bad \\x1b[31m"
    assert "caf\\xe9" in screen
    assert not set(screen) & set("\x1b\x07\x9b\r\udce9")
