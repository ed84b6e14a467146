"""Charts as data. `assets/charts.js` draws them in a page, `tools/study/plots.py` draws them as files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Numbers = Sequence[float | None]  # None leaves a gap


@dataclass(frozen=True)
class Series:
    """One line, one set of points, or one colour of a stack."""

    name: str
    y: Numbers
    x: Sequence[float | str] = ()  # in a bar chart, the labels of the bars
    low: Numbers = ()  # an interval around y, of the same length
    high: Numbers = ()
    is_dashed: bool = False  # for values that were not measured: an ideal, a prediction
    has_points: bool = False
    group: str = ""  # series of one group share a colour
    colour: int | None = None  # the number in the palette, to use the same colour in several charts


@dataclass(frozen=True)
class Mark:
    """An event: a vertical line in a line chart."""

    x: float
    label: str


@dataclass(frozen=True)
class Chart:
    """Lines over a number axis, or bars over labels."""

    id: str  # unique in its page; also the name of its file
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    kind: Literal["line", "stacked-bar", "bar"] = "line"
    x_log: bool = False
    y_log: bool = False
    x_ticks: Sequence[float] = ()  # required labels of the axis, for example 1 2 4 8
    y_from_zero: bool = False
    y_format: Literal["number", "percent", "seconds", "bytes"] = "number"
    note: str = ""  # one sentence under the chart
    wide: bool = False  # takes the whole width of the page
    marks: Sequence[Mark] = ()

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Matrix:
    """A table of counts with a colour per cell: a confusion matrix."""

    id: str
    title: str
    labels: Sequence[str]
    values: Sequence[Sequence[float]]
    x_label: str = "predicted"
    y_label: str = "true"
    kind: str = field(default="matrix", init=False)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Table:
    """Rows of text and numbers. Numbers are aligned right. The page can sort by any column."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str | float | int | None]]
    caption: str = ""
