"""A printable table of rows. Converts to a DataFrame if pandas is installed."""

from __future__ import annotations

import html
import importlib
from datetime import datetime
from typing import Any

from paceline.errors import UserError

SHOWN_ROWS = 20  # rows; the rest is counted


class Table(list[dict[str, Any]]):
    """A list of rows. `pandas.DataFrame(table)` works, and so does `polars.DataFrame(table)`."""

    @property
    def columns(self) -> list[str]:
        """The columns of all rows, in the order of their first appearance."""
        return list(dict.fromkeys(name for row in self for name in row))

    def column(self, name: str) -> list[Any]:
        """One column from top to bottom; None if a row has no such value."""
        if name not in self.columns:
            raise UserError(f"there is no column {name!r}", allowed=", ".join(self.columns) or "the table is empty")
        return [row.get(name) for row in self]

    def to_pandas(self) -> Any:
        """A pandas.DataFrame."""
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as error:
            raise UserError("pandas is not installed", hint="pip install pandas") from error
        return pandas.DataFrame(list(self))

    def __repr__(self) -> str:
        if not self:
            return "(no rows)"
        cells = [self.columns, *self._cells()]
        widths = [max(len(row[number]) for row in cells) for number in range(len(self.columns))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
        return "\n".join(lines) + (f"\n... {len(self)} rows in all" if len(self) > SHOWN_ROWS else "")

    def _repr_html_(self) -> str:
        """For notebooks."""
        head = "".join(f"<th>{html.escape(name)}</th>" for name in self.columns)
        body = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in self._cells()]
        rows = "".join(f"<tr>{row}</tr>" for row in body)
        more = f"<p>... {len(self)} rows in all</p>" if len(self) > SHOWN_ROWS else ""
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>{more}"

    def _cells(self) -> list[list[str]]:
        return [[_shown(name, row.get(name)) for name in self.columns] for row in self[:SHOWN_ROWS]]


def _shown(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "time":
        return datetime.fromtimestamp(value).strftime("%H:%M:%S")
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.5g}"
    return str(value)
