"""Run the cells of a notebook or a guide one after the other, like a notebook: without a file for `__main__`.

`python -c "from harness.cells import main; main(PATH)"`. Python finds the source lines of a cell by the cell's name,
as in IPython.
"""

from __future__ import annotations

import json
import linecache
import re
import sys
from pathlib import Path

_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def read_cells(path: Path) -> list[str]:
    """The code cells of a .ipynb, or the python blocks of a .md."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return _BLOCK.findall(text)
    return ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]


def main(path: str) -> None:
    namespace = vars(sys.modules["__main__"])
    for number, source in enumerate(read_cells(Path(path))):
        name = f"<cell {number}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        exec(compile(source, name, "exec"), namespace)
