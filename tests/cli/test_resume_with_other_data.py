"""`paceline train --resume` with other data, with the command."""

from __future__ import annotations

import json
from pathlib import Path

from harness.cli import paceline

RUN = [
    *("train", "shapes-cnn", "--dataset=harness.changing_data:load", "--data-dir=.", "--augment=none"),
    *("--global-batch-size=32", "--epochs=1", "--save-steps=2", "--log-frequency=1", "--track", "--output-dir=run"),
]
TESTS = str(Path(__file__).parents[1])


def test_other_data_ends_with_exit_code_4_and_the_flag_accepts_it_once(tmp_path: Path) -> None:
    """Also on another number of ranks. config.yaml does not keep the flag. The checkpoint records the accepted data."""
    first = paceline(*RUN, "--processes=1", "--max-steps=4", cwd=tmp_path, PYTHONPATH=TESTS)
    assert first.code == 0, first
    (tmp_path / "variant.json").write_text('{"front": 32}')
    refused = paceline(*RUN, "--processes=2", "--resume=auto", cwd=tmp_path, PYTHONPATH=TESTS)
    assert refused.code == 4, refused
    assert "320 then, 352 now" in refused.err
    accepted = paceline(*RUN, "--processes=2", "--resume=auto", "--accept-new-data", cwd=tmp_path, PYTHONPATH=TESTS)
    assert accepted.code == 0, accepted
    said = json.loads((tmp_path / "run" / "data.json").read_text())
    assert [entry["step"] for entry in said["accepted"]] == [4]
    assert said["split"] == "keys"
    assert "accept_new_data: true" not in (tmp_path / "run" / "config.yaml").read_text()
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["steps"] == (352 - 32) // 32  # the run trains on every new sample: 320 of 352
