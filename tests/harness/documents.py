"""The project's Markdown pages: links, headings, code, and commands for the reader."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from paceline.cli.main import VERBS

REPOSITORY = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^\s*(?:```|~~~)(?P<language>\w*)")
_LINK = re.compile(r"\[(?:[^\[\]]|\[[^\]]*\])*\]\((?P<target>[^()\s]+)\)")
SHELL = {"", "bash", "sh", "console"}
# `paceline VERB ...` at the beginning of a line, in $(...), or in the ranks of torchrun.
_PACELINE = re.compile(r"(?:^(?:\$ )?(?:\S*bin/)?|^\w+=\$\(|^torchrun .*-m )paceline (?P<rest>[a-z]+(?: .*)?)$")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str


@dataclass(frozen=True)
class Command:
    """A `paceline` command in a page, without its comment."""

    page: str
    line: int
    text: str  # "train shapes-cnn --epochs 2"

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text)


def pages() -> list[Path]:
    """All pages: README, docs, course, examples and pages for contributors."""
    folders = ("docs", "course", "examples", "benchmarks/results")
    return [*REPOSITORY.glob("*.md"), *(page for name in folders for page in sorted((REPOSITORY / name).rglob("*.md")))]


def name_of(page: Path) -> str:
    return page.relative_to(REPOSITORY).as_posix()


def links(page: Path) -> Iterator[tuple[int, str]]:
    """Line and target of every link inside the project."""
    for line, text, is_code in _lines(page):
        for found in () if is_code else _LINK.finditer(re.sub(r"`[^`]*`", "", text)):
            if not re.match(r"[a-z]+:", found["target"]):
                yield line, found["target"]


def anchors(page: Path) -> set[str]:
    """The valid anchors of `page.md#...`, as GitHub and the site create them from headings."""
    found: set[str] = set()
    for _, text, is_code in _lines(page):
        if not is_code and (heading := re.match(r"#{1,6} +(.*)", text)):
            words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).lower()
            found.add(re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", words).strip()))
    return found


def blocks(page: Path) -> Iterator[Block]:
    """Every fenced block."""
    language, first, lines = "", 0, []
    for number, text, is_code in _lines(page):
        if not _FENCE.match(text):
            lines += [text] if is_code else []
        elif is_code:
            language, first, lines = _FENCE.match(text)["language"], number + 1, []  # type: ignore[index]
        else:
            yield Block(name_of(page), first, language, "\n".join(lines))


def shell_lines(page: Path) -> Iterator[tuple[int, str]]:
    """Lines of shell blocks and of blocks without a language. Lines that end with a backslash are joined."""
    for block in blocks(page):
        if block.language in SHELL:
            joined = block.text.replace("\\\n", "\0")
            for offset, line in enumerate(joined.split("\n")):
                yield block.line + offset, re.sub(r"\0\s*", "", line)


def commands(page: Path) -> Iterator[Command]:
    """Every `paceline` command of a page. Two spaces end it, as do a comment, a pipe and a redirection."""
    for number, line in shell_lines(page):
        text = re.split(r"\s{2,}|\s(?:#|\||2?>)", line.rstrip())[0]
        found = _PACELINE.match(text)
        if found and found["rest"].split()[0] in VERBS:
            yield Command(name_of(page), number, re.sub(r" \[[^\]]*\]", "", found["rest"]))


def _lines(page: Path) -> Iterator[tuple[int, str, bool]]:
    """Line number, text, and whether it is code. An opening fence counts as code, a closing one does not."""
    is_code = False
    for number, text in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        is_code ^= bool(_FENCE.match(text))
        yield number, text, is_code
