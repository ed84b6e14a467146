"""Prints the findings."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import TextIO

from paceline.tools.doctor.findings import Finding

_SIGNS = {"pass": "✓", "skip": "-", "warn": "!", "fail": "✗"}
_PLAIN_SIGNS = {"pass": "ok  ", "skip": "skip", "warn": "WARN", "fail": "FAIL"}
_COLOURS = {"pass": "32", "skip": "2", "warn": "33", "fail": "31"}
_NAME = 17
_LEAST_WIDTH, _MOST_WIDTH = 60, 140


class Screen:
    """Uses symbols and colours if the terminal has them, otherwise words."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        encoding = (getattr(self._stream, "encoding", "") or "").lower().replace("-", "")
        is_terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._has_colour = is_terminal and "NO_COLOR" not in os.environ
        self._signs = _SIGNS if self._has_colour and encoding == "utf8" else _PLAIN_SIGNS
        width = shutil.get_terminal_size((100, 24)).columns
        self._width = max(_LEAST_WIDTH, min(_MOST_WIDTH, width))

    def show(self, findings: Sequence[Finding]) -> None:
        for line in self.lines(findings):
            print(line, file=self._stream, flush=True)

    def say(self, text: str, status: str = "") -> None:
        print(self._paint(text, _COLOURS.get(status, "1")), file=self._stream, flush=True)

    def lines(self, findings: Sequence[Finding]) -> Iterator[str]:
        group = None
        for finding in findings:
            if finding.group != group:
                group = finding.group
                yield ""
                yield self._paint(group, "1")
            yield from self._lines_of(finding)

    def _lines_of(self, finding: Finding) -> Iterator[str]:
        sign = self._signs[finding.status]
        indent = " " * (len(sign) + _NAME + 4)
        head = f"  {self._paint(sign, _COLOURS[finding.status])} {finding.name:<{_NAME}} "
        first, *rest = self._wrap(finding.what, len(indent))
        yield head + first
        yield from (indent + line for line in rest)
        if finding.remedy:
            first, *rest = self._wrap(finding.remedy, len(indent) + 5)
            yield f"{indent}try: {first}"
            yield from (f"{indent}     {line}" for line in rest)

    def _wrap(self, text: str, used: int) -> list[str]:
        return textwrap.wrap(text, self._width - used, break_long_words=False, break_on_hyphens=False) or [""]

    def _paint(self, text: str, colour: str) -> str:
        return f"\033[{colour}m{text}\033[0m" if self._has_colour else text
