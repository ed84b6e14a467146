"""Links work, the reference matches the program, and the site has all pages."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import documents
from harness.documents import REPOSITORY, name_of


@pytest.mark.parametrize("page", documents.pages(), ids=name_of)
def test_every_link_and_anchor_exists(page: Path) -> None:
    broken = [f"{name_of(page)}:{line}: {target}" for line, target in documents.links(page) if _is_broken(page, target)]

    assert not broken


def _is_broken(page: Path, target: str) -> bool:
    path, _, anchor = target.partition("#")
    to = (page.parent / path).resolve() if path else page
    if not to.exists() or not to.is_relative_to(REPOSITORY):
        return True
    return bool(anchor) and to.suffix == ".md" and anchor not in documents.anchors(to)


def test_broken_links_are_detected() -> None:
    page = REPOSITORY / "docs" / "index.md"

    assert _is_broken(page, "guides/nowhere.md")
    assert _is_broken(page, "exact.md#nowhere")
    assert _is_broken(page, "../../outside.md")
    assert not _is_broken(page, "reliability.md#rehearse-it")


def test_the_reference_is_up_to_date() -> None:
    """If not: python docs/generate_reference.py."""
    done = subprocess.run(
        [sys.executable, "docs/generate_reference.py", "--check"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_site_has_every_page_and_no_other() -> None:
    sys.path.insert(0, str(REPOSITORY / "docs"))
    try:
        import stage  # type: ignore[import-not-found]
    finally:
        sys.path.pop(0)
    staged = {place.as_posix() for place in dict(stage._pages()).values() if place.suffix == ".md"}
    project = tomllib.loads((REPOSITORY / "zensical.toml").read_text())["project"]
    listed = list(_nav(project["nav"]))

    assert len(listed) == len(set(listed))
    assert set(listed) - staged == {"results/index.md"}  # written when pages are staged
    # Linked from other pages.
    below = ("decisions/", "results/", "examples/")
    assert {page for page in staged if not page.startswith(below)} <= set(listed)


def _nav(entries: Any) -> Iterator[str]:
    for entry in entries:
        for target in entry.values():
            if isinstance(target, str):
                yield target
            else:
                yield from _nav(target)


def test_every_decision_is_in_their_list() -> None:
    folder = REPOSITORY / "docs" / "decisions"
    listed = [target for _, target in documents.links(folder / "index.md")]

    assert listed == sorted(page.name for page in folder.glob("0*.md"))


def test_every_make_target_in_a_page_exists() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    documented = {
        (name_of(page), words[1])
        for page in documents.pages()
        for _, line in documents.shell_lines(page)
        if len(words := line.split()) > 1 and words[0] == "make" and "=" not in words[1]
    }

    assert documented
    assert [use for use in documented if f"\n{use[1]}:" not in makefile] == []


_TEST_PATH = re.compile(r"(?<![\w/.-])tests/[\w./-]*\w")


def _missing_tests(text: str) -> list[str]:
    return [path for path in _TEST_PATH.findall(text) if not (REPOSITORY / path).exists()]


def test_every_test_path_in_a_page_exists() -> None:
    """Not in measured results: they name the tests of their date."""
    pages = [page for page in documents.pages() if not name_of(page).startswith("benchmarks/results/")]
    missing = {name_of(page): _missing_tests(page.read_text(encoding="utf-8")) for page in pages}

    assert {name: paths for name, paths in missing.items() if paths} == {}


def test_missing_test_paths_would_be_found() -> None:
    assert _missing_tests("`tests/docs`, `tests/docs/test_documentation.py`, (`tests/faults/`).") == []
    assert _missing_tests("see `tests/docs/test_nothing.py`.") == ["tests/docs/test_nothing.py"]


def test_every_python_file_a_page_runs_exists() -> None:
    missing = []
    for page in documents.pages():
        # A page can show the file: its first line is the name.
        shown = {block.text.partition("\n")[0].removeprefix("# ") for block in documents.blocks(page)}
        for number, line in documents.shell_lines(page):
            words = [word for word in line.split() if "=" not in word]
            if len(words) > 1 and words[0].endswith("python") and words[1].endswith(".py"):
                # Pages about an example have a `cd` before.
                places = [REPOSITORY / words[1], *REPOSITORY.glob(f"examples/*/{words[1]}")]
                is_there = words[1] in shown or any(map(Path.exists, places))
                missing += [] if is_there else [f"{name_of(page)}:{number}: {line}"]

    assert missing == []
