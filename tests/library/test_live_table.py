"""The table of epochs in a notebook, in a real IPython shell, and plain lines everywhere else."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from harness.cli import command
from harness.extras import need_packages
from paceline.library.epochs import open_live_table

pytestmark = pytest.mark.long

CODE = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output

shell = InteractiveShell.instance()
cell = '''
import paceline
seen = []
run = paceline.train("synthetic-mlp", num_samples=640, global_batch_size=64, epochs=3, processes=1, track=(),
                     output_dir="run", on_epoch=lambda epoch: seen.append(epoch.number))
'''
with capture_output() as captured:
    result = shell.run_cell(cell)
result.raise_error()
shown = [(out.update, out.data.get("text/html", "").count("<tr>")) for out in captured.outputs]
print(json.dumps({"shown": shown, "seen": shell.user_ns["seen"], "out": captured.stdout}))
"""


def test_a_real_ipython_shell_shows_one_table_that_grows(tmp_path: Path) -> None:
    need_packages("IPython")
    answer = command(sys.executable, "-c", CODE, cwd=tmp_path, IPYTHONDIR=str(tmp_path / "ipython"))
    assert answer.code == 0, answer
    found = json.loads(answer.out.splitlines()[-1])
    assert found["shown"] == [[False, 2], [True, 3], [True, 4]]  # a heading, and a row per epoch
    assert found["seen"] == [1, 2, 3]
    assert "data      synthetic" in found["out"]  # the header and the summary are text
    assert "test accuracy" in found["out"]
    assert "val loss" not in found["out"]
    assert "step 8/" not in found["out"]


def test_a_script_and_a_terminal_get_plain_lines(tmp_path: Path) -> None:
    assert open_live_table() is None
    code = "import paceline; paceline.train('synthetic-mlp', num_samples=640, global_batch_size=64, epochs=1, track=())"
    answer = command(sys.executable, "-c", code, cwd=tmp_path)
    assert answer.code == 0, answer
    assert "epoch 1/1" in answer.out


def test_ipython_in_a_terminal_gets_plain_lines() -> None:
    need_packages("IPython")
    code = (
        "from IPython.terminal.interactiveshell import TerminalInteractiveShell as Shell; Shell.instance();"
        "from paceline.library.epochs import open_live_table; import sys; sys.exit(open_live_table() is not None)"
    )
    assert command(sys.executable, "-c", code, cwd=Path.cwd()).code == 0
