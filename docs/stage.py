"""Puts the pages of the site into one folder: docs, the course, measured results, and what contributors read.

    python docs/stage.py FOLDER

The repository is read in place, by people and by its links; a site is one tree of its own. So pages are copied, and a
link that leaves a page goes to where its target now lies. A target that is not on the site (a source file) loses its
link and keeps its words.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
# What is on the site, and under which folder of it.
PLACES = {
    "docs": "",
    "course": "course",
    "benchmarks/results": "results",
    "examples": "examples",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
SHOWN = {".md", ".png", ".svg", ".css", ".js"}
INSTEAD = {"README.md": "index.md", "LICENSE": "contributing.md"}
# A link or picture: its words, where it goes, and which part of that page.
LINK = re.compile(r"(?P<words>!?\[(?:[^\[\]]|\[[^\]]*\])*\])\((?P<target>[^()\s#]*)(?P<anchor>#[^()\s]*)?\)")
FENCE = re.compile(r"^\s*(```|~~~)")


def stage(folder: Path) -> int:
    """Write all pages into a new folder; returns how many."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = dict(_pages())
    for source, place in pages.items():
        target = folder / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".md":
            target.write_text(_relinked(source, place, pages), encoding="utf-8")
        else:
            shutil.copyfile(source, target)
    _write_results_index(folder / "results", pages)
    return len(pages)


def _pages() -> Iterator[tuple[Path, Path]]:
    """Every file of the site, and its place there."""
    for source, place in PLACES.items():
        path = REPOSITORY / source
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.suffix in SHOWN and file.is_file():
                name = file.relative_to(path) if path.is_dir() else Path()
                # Folders show their page when they are opened.
                yield file, Path(place, name).with_name("index.md") if file.name == "README.md" else Path(place, name)


def _relinked(source: Path, place: Path, pages: dict[Path, Path]) -> str:
    lines, is_code = [], False
    for line in source.read_text(encoding="utf-8").splitlines():
        is_code ^= bool(FENCE.match(line))
        lines.append(line if is_code else _for_site(line, source, place, pages))
    return "\n".join(lines) + "\n"


def _for_site(line: str, source: Path, place: Path, pages: dict[Path, Path]) -> str:
    line = LINK.sub(lambda link: _link(link, source, place, pages), line)
    # GitHub reads Markdown inside of this element by itself, the site only with the attribute.
    return line.replace("<details>", '<details markdown="1">')


def _link(link: re.Match[str], source: Path, place: Path, pages: dict[Path, Path]) -> str:
    words, target, anchor = link["words"], link["target"], link["anchor"] or ""
    if not target or "://" in target or target.startswith("mailto:"):
        return link[0]
    path = Path(os.path.normpath(source.parent / target))
    goes_to = _place_of(path, pages)
    if goes_to is None:
        return words[1:-1]
    return f"{words}({os.path.relpath(goes_to, place.parent)}{anchor})"


def _place_of(path: Path, pages: dict[Path, Path]) -> Path | None:
    if path in pages:
        return pages[path]
    name = path.relative_to(REPOSITORY).as_posix()
    if name in INSTEAD:
        return Path(INSTEAD[name])
    if name == "benchmarks/results":
        return Path("results/index.md")
    return next((pages[path / page] for page in ("README.md", "index.md") if path / page in pages), None)


def _write_results_index(folder: Path, pages: dict[Path, Path]) -> None:
    """The measured results, by their own titles."""
    rows = []
    for source, place in pages.items():
        if place.parent == Path("results"):
            title = source.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
            rows.append(f"- [{title}]({place.name})")
    text = "# Measured results\n\nEach with its date, machine, versions and command.\n\n"
    (folder / "index.md").write_text(text + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    print(f"{stage(Path(sys.argv[1]))} files of the site in {sys.argv[1]}")
