"""A script without `if __name__ == "__main__"` that catches errors does not train when its functions are imported."""

from __future__ import annotations

from pathlib import Path

import pytest

import paceline
from paceline.data.reference import resolve_reference
from paceline.errors import UserError
from paceline.runs.sources import collect_sources
from paceline.settings.syntax import CodeReference

SCRIPT = """
import threading
import paceline
from paceline.runs.sources import collect_sources
from paceline.settings.syntax import CodeReference

refused = []

def build():
    return refused

def attempt(function):
    try:
        function()
    except paceline.errors.UserError as error:
        refused.append(error)

def train():
    attempt(lambda: paceline.train("synthetic-mlp", num_samples=640, global_batch_size=64, epochs=1, processes=1))

train()
thread = threading.Thread(target=train)
thread.start()
thread.join()
attempt(lambda: paceline.study("synthetic-mlp", world_sizes=[1]))
# What run.evaluate() and run.predict() do:
sources = collect_sources([CodeReference("model_name", FILE, "build")])
attempt(lambda: refused.extend(sources.resolve(FILE + ":build", where="")()))
"""


@pytest.mark.parametrize("is_stored", [True, False])
def test_an_imported_script_trains_nothing(is_stored: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = str(tmp_path / "script.py")
    Path(file).write_text(SCRIPT.replace("FILE", repr(file)))
    stored = collect_sources([CodeReference("model_name", file, "build")])
    build = (stored.resolve if is_stored else resolve_reference)(f"{file}:build", where="--model-name")
    refused: list[UserError] = build()
    # The stored source refuses itself. Imported from the file, it imports the stored source once, which adds its own.
    assert len(refused) == (4 if is_stored else 3 + 4)
    assert all("script.py, line " in str(error.where) and "__main__" in str(error.hint) for error in refused)
    assert [path.name for path in tmp_path.iterdir()] == ["script.py"]
    assert paceline.plan("synthetic-mlp", processes=1).world_size == 1  # nothing is left behind
