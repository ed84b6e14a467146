"""Writes one self-contained HTML file: text, key figures, charts, tables and pictures.

All input is text and is escaped. Paragraphs support `**bold**`, `` `code` `` and `[text](#section)`.
The page's policy forbids all requests and all other scripts. The same input gives the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from paceline.reports.charts import Chart, Matrix, Series, Table
from paceline.runs.folder import write_atomically

MOST_POINTS = 1500
_KEPT_PER_BUCKET = 3  # its lowest, its highest, and a gap
Tone = Literal["", "good", "warn", "bad"]
_ASSETS = Path(__file__).parent / "assets"
_SCRIPTS = ("charts.js", "bars.js", "page.js")
_MARKUP = re.compile(
    r"`(?P<code>[^`]+)`|\*\*(?P<bold>.+?)\*\*|\[(?P<text>[^\]]+)\]\(#(?P<anchor>[A-Za-z0-9_-]+)\)", re.DOTALL
)
_NUMBER_WORDS = re.compile(r"[-+±]?[\d][\d,.:]*( ?(%|x|×|s|ms|min|h|MB|MiB|GB|GiB|KiB|k|M))?")
_DIGITS = 7  # significant digits of the numbers in charts


# Reduces the points of long curves to what a screen can show, and keeps all peaks.


def thin(series: Series, most_points: int = MOST_POINTS) -> Series:
    """The same curve with at most `most_points` points: the lowest and highest of each section, and the ends."""
    count = len(series.y)
    if count <= most_points:
        return series
    size = math.ceil((count - 2) / max((most_points - 2) // _KEPT_PER_BUCKET, 1))
    kept = {0, count - 1}
    for start in range(1, count - 1, size):
        kept.update(_extremes(series, range(start, min(start + size, count - 1))))
    order = sorted(kept)
    xs = series.x or range(1, count + 1)
    return replace(
        series,
        x=[xs[i] for i in order],
        y=[series.y[i] for i in order],
        low=[series.low[i] for i in order] if series.low else (),
        high=[series.high[i] for i in order] if series.high else (),
    )


def _extremes(series: Series, bucket: range) -> set[int]:
    numbers = {i: value for i in bucket if (value := series.y[i]) is not None and math.isfinite(value)}
    gap = next((i for i in bucket if i not in numbers), None)
    kept = {gap} if gap is not None else set()
    return kept | ({min(numbers, key=numbers.__getitem__), max(numbers, key=numbers.__getitem__)} if numbers else set())


@dataclass(frozen=True)
class Tile:
    """A key figure."""

    label: str
    value: str
    note: str = ""
    tone: Tone = ""


@dataclass(frozen=True)
class Tiles:
    tiles: Sequence[Tile]


@dataclass(frozen=True)
class Code:
    """Preformatted text: a command, a traceback, a file."""

    text: str


@dataclass(frozen=True)
class Picture:
    source: str  # a data: URI
    alt: str
    caption: str = ""
    note: str = ""
    tone: Tone = ""
    beside: str = ""  # a second picture, to its right


@dataclass(frozen=True)
class Gallery:
    pictures: Sequence[Picture]


@dataclass(frozen=True)
class Details:
    """A block that is collapsed until the reader opens it."""

    summary: str
    blocks: Sequence[Block]
    is_open: bool = False


@dataclass(frozen=True)
class Slider:
    """Frames of which one is visible, chosen with a slider. Without JavaScript all of them are. No charts inside."""

    label: str
    frames: Sequence[tuple[str, Sequence[Block]]]  # a title, and what is below it


Block = str | Tiles | Chart | Matrix | Table | Code | Gallery | Details | Slider


@dataclass(frozen=True)
class Section:
    title: str
    blocks: Sequence[Block]
    id: str = ""  # the anchor for links; made from the title if it is empty

    @property
    def anchor(self) -> str:
        return self.id or re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-") or "section"


def picture_source(png: bytes) -> str:
    """A PNG as a data URI."""
    return "data:image/png;base64," + base64.b64encode(png).decode()


def write_page(
    path: Path,
    title: str,
    sections: Sequence[Section],
    *,
    subtitle: str = "",
    verdict: str = "",
    tone: Tone = "",
    footer: str = "",
) -> Path:
    """Write a page. `verdict` is one sentence at the top, in the colour of `tone`."""
    text = render_page(title, sections, subtitle=subtitle, verdict=verdict, tone=tone, footer=footer)
    write_atomically(path, text, is_durable=False)
    return path


def render_page(
    title: str,
    sections: Sequence[Section],
    *,
    subtitle: str = "",
    verdict: str = "",
    tone: Tone = "",
    footer: str = "",
) -> str:
    style, script = _assets()
    specs: list[dict[str, Any]] = []
    body = "\n".join(_section(section, specs) for section in sections)
    links = "".join(f'<li><a href="#{escape(s.anchor)}">{escape(s.title)}</a></li>' for s in sections)
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_sha256(style)}'; script-src '{_sha256(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">',
        f"<title>{escape(title)}</title>",
        f"<style>{style}</style></head><body>",
        f'<header><div class="inner"><h1>{escape(title)}</h1>',
        f'<p class="subtitle">{_prose(subtitle)}</p>' if subtitle else "",
        f'<p class="verdict {tone}">{_prose(verdict)}</p>' if verdict else "",
        "</div></header>",
        f'<nav aria-label="Sections"><div class="inner"><ul>{links}</ul>',
        '<button type="button" class="small-button theme" hidden></button></div></nav>',
        "<main>",
        "<noscript><p>The charts need JavaScript; tables and text do not.</p></noscript>",
        body,
        f"<footer>{_prose(footer)}</footer>" if footer else "",
        "</main>",
        f'<script type="application/json" id="chart-specs">{safe_json(specs)}</script>',
        f"<script>{script}</script></body></html>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def safe_json(content: object) -> str:
    """JSON that is safe inside a script element: escaped so that nothing in it can end the element."""
    text = json.dumps(_finite(content), allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _finite(value: Any) -> Any:
    """Plain lists and dicts with shortened floats. NaN and infinity become gaps."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [_finite(item) for item in value]
    return value


@cache
def _assets() -> tuple[str, str]:
    style = (_ASSETS / "page.css").read_text(encoding="utf-8")
    script = "\n".join((_ASSETS / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    return style, script


def _sha256(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


# --- Blocks


def _section(section: Section, specs: list[dict[str, Any]]) -> str:
    heading = f"<h2>{escape(section.title)}</h2>"
    return f'<section id="{escape(section.anchor)}">{heading}\n{_blocks(section.blocks, specs)}</section>'


def _blocks(blocks: Iterable[Block], specs: list[dict[str, Any]]) -> str:
    """Adjacent charts are placed side by side if there is space."""
    parts = []
    for are_charts, group in groupby(blocks, key=lambda block: isinstance(block, (Chart, Matrix))):
        inner = "\n".join(_block(block, specs) for block in group)
        parts.append(f'<div class="charts">{inner}</div>' if are_charts else inner)
    return "\n".join(parts)


def _block(block: Block, specs: list[dict[str, Any]]) -> str:
    match block:
        case str():
            return f"<p>{_prose(block)}</p>"
        case Tiles():
            return f'<dl class="tiles">{"".join(map(_tile, block.tiles))}</dl>'
        case Chart() | Matrix():
            return _chart(block, specs)
        case Table():
            return _table(block)
        case Code():
            return f'<pre tabindex="0">{escape(block.text)}</pre>'
        case Gallery():
            pairs = " pairs" if any(picture.beside for picture in block.pictures) else ""
            return f'<ul class="gallery{pairs}">{"".join(map(_picture, block.pictures))}</ul>'
        case Details():
            state = " open" if block.is_open else ""
            inner = _blocks(block.blocks, specs)
            return f'<details class="fold"{state}><summary>{_prose(block.summary)}</summary>\n{inner}</details>'
        case Slider():
            return _slider(block, specs)
    raise TypeError(f"a page cannot show a {type(block).__name__}")


def _slider(slider: Slider, specs: list[dict[str, Any]]) -> str:
    last = len(slider.frames) - 1
    frames = "\n".join(
        f'<div class="frame"><h3>{escape(title)}</h3>\n{_blocks(blocks, specs)}</div>'
        for title, blocks in slider.frames
    )
    return (
        f'<div class="slider"><label hidden>{escape(slider.label)} '
        f'<input type="range" min="0" max="{last}" value="{last}" step="1"></label>\n{frames}</div>'
    )


def _prose(text: str) -> str:
    def mark(found: re.Match[str]) -> str:
        if found["code"]:
            return f"<code>{found['code']}</code>"
        if found["bold"]:
            return f"<strong>{found['bold']}</strong>"
        return f'<a href="#{found["anchor"]}">{found["text"]}</a>'

    return _MARKUP.sub(mark, escape(text))


def _tile(tile: Tile) -> str:
    note = f'<dd class="note">{escape(tile.note)}</dd>' if tile.note else ""
    return (
        f'<div class="tile {tile.tone}"><dt>{escape(tile.label)}</dt>'
        f'<dd class="value">{escape(tile.value)}</dd>{note}</div>'
    )


def _chart(chart: Chart | Matrix, specs: list[dict[str, Any]]) -> str:
    if isinstance(chart, Chart):
        if chart.kind == "line":
            chart = replace(chart, series=[thin(series) for series in chart.series])
        wide, note = chart.wide, chart.note
    else:
        wide, note = False, ""
    specs.append(chart.as_json())
    return (
        f'<figure class="chart{" wide" if wide else ""}" id="chart-{escape(chart.id)}">'
        f'<div class="head"><figcaption>{escape(chart.title)}</figcaption>'
        '<button type="button" class="small-button reset" hidden>Reset zoom</button></div>'
        '<div class="legend"></div><div class="plot"></div>'
        + (f'<p class="note">{_prose(note)}</p>' if note else "")
        + '<details><summary>Data</summary><div class="scroll" tabindex="0"></div></details></figure>'
    )


def _picture(picture: Picture) -> str:
    sources = [source for source in (picture.source, picture.beside) if source]
    if not all(source.startswith("data:image/") for source in sources):
        raise ValueError("a picture must be a data: URI: the page loads nothing")
    note = f"<small>{escape(picture.note)}</small>" if picture.note else ""
    images = "".join(f'<img src="{escape(source)}" alt="{escape(picture.alt)}">' for source in sources)
    return f'<li class="{picture.tone}">{images}<p>{escape(picture.caption)}{note}</p></li>'


def _table(table: Table) -> str:
    are_numbers = [_is_numeric([row[n] for row in table.rows]) for n in range(len(table.columns))]
    head = "".join(
        f'<th scope="col"{_number_class(is_number)}>{escape(name)}</th>'
        for name, is_number in zip(table.columns, are_numbers, strict=True)
    )
    rows = "".join(
        f"<tr>{''.join(_cell(value, is_number) for value, is_number in zip(row, are_numbers, strict=True))}</tr>\n"
        for row in table.rows
    )
    caption = f"<caption>{_prose(table.caption)}</caption>" if table.caption else ""
    kind = ' class="sortable"' if len(table.rows) > 2 and any(are_numbers) else ""
    return (
        f'<div class="scroll" tabindex="0"><table{kind}>{caption}<thead><tr>{head}</tr></thead>\n'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _number_class(is_number: bool) -> str:
    return ' class="number"' if is_number else ""


def _is_numeric(values: Sequence[str | float | int | None]) -> bool:
    given = [value for value in values if value not in (None, "", "-")]
    return bool(given) and all(not isinstance(v, str) or _NUMBER_WORDS.fullmatch(v) is not None for v in given)


def _cell(value: str | float | int | None, is_number: bool) -> str:
    text = "" if value is None else escape(value) if isinstance(value, str) else show_number(value)
    sort_by = _sort_value(value) if is_number else None
    data = f' data-value="{sort_by:.10g}"' if sort_by is not None else ""
    return f"<td{_number_class(is_number)}{data}>{text}</td>"


def _sort_value(value: str | float | int | None) -> float | None:
    if isinstance(value, str):
        found = re.match(r"[-+]?[\d,]*\.?\d+", value)
        value = float(found[0].replace(",", "")) if found else None
    return float(value) if value is not None and math.isfinite(value) else None


def show_number(value: float) -> str:
    """A number in a table: whole numbers in groups of three digits, others with about four digits."""
    if isinstance(value, int):
        return f"{value:,}"
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if size >= 1e-4 or size == 0 else f"{value:.2e}"
