"""One set of pictures as a folder, packed shards, tar, zip and parquet files and in a store trains the same weights.

On 1 and 2 ranks, and after a rank was killed. So does data that exceeds its cache, in the order of its windows.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from harness.archive_files import make_pictures, write_parquet, write_webdataset, write_zip
from harness.cli import paceline
from harness.extras import need_packages
from harness.runs import read_results, step_losses

pytestmark = pytest.mark.long
FLAGS = (
    *("train", "shapes-cnn", "--dataset=folder", "--image-size=28", "--global-batch-size=8", "--epochs=2", "--exact"),
    *("--lanes=2", "--track", "--log-frequency=1", "--save-steps=2", "--output-dir=run"),
)
KILL = ("--inject", "kill rank=1 step=3")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("sources")
    pictures = make_pictures(root / "pictures", {"train": 16, "test": 2})
    shards = write_webdataset(pictures, root / "tar", shards=6)
    packing = paceline("data", "pack", str(pictures), "packed", "--format=encoded", cwd=root)
    assert packing.code == 0, packing.err
    found = {
        "folder": str(pictures),
        "packed": str(root / "packed"),
        "tar": str(shards),
        "zip": str(write_zip(pictures, root / "all.zip")),
        "store": f"file://{shards}",
    }
    if importlib.util.find_spec("pyarrow"):
        found["parquet"] = str(write_parquet(pictures, root / "parquet"))
    return found


def run(cwd: Path, data: str, ranks: int, *flags: str) -> tuple[str, list[float]]:
    cwd.mkdir()
    environment = {"PACELINE_CACHE": str(cwd / "cache")}
    answer = paceline(*FLAGS, f"--data-dir={data}", f"--processes={ranks}", *flags, cwd=cwd, env=environment)
    assert answer.code == 0, answer.err
    assert ("--inject" in flags) == ("attempt 2" in answer.out + answer.err or "restart" in answer.out + answer.err)
    return read_results(cwd / "run")["weights_sha256"], step_losses(cwd / "run")


@pytest.fixture(scope="module")
def wanted(sources: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[float]]:
    return run(tmp_path_factory.mktemp("wanted") / "folder", sources["folder"], 1)


@pytest.mark.parametrize(
    ("kind", "ranks", "flags"),
    [
        ("packed", 1, ()),
        ("packed", 2, KILL),
        ("tar", 2, KILL),
        ("zip", 2, ()),
        ("store", 1, ()),
        ("store", 2, KILL),
    ],
)
def test_every_source_trains_the_same_weights(
    kind: str,
    ranks: int,
    flags: tuple[str, ...],
    sources: dict[str, str],
    wanted: tuple[str, list[float]],
    tmp_path: Path,
) -> None:
    assert run(tmp_path / "run", sources[kind], ranks, *flags) == wanted


def test_parquet_files_train_the_same_weights(
    sources: dict[str, str], wanted: tuple[str, list[float]], tmp_path: Path
) -> None:
    need_packages("pyarrow")
    assert run(tmp_path / "run", sources["parquet"], 2, *KILL) == wanted


def test_windows_train_the_same_weights_on_any_ranks_and_after_a_kill(sources: dict[str, str], tmp_path: Path) -> None:
    """The cache holds a part of the data."""
    shard_bytes = max(path.stat().st_size for path in Path(sources["tar"]).glob("train-*"))
    small = ("--cache-gb", str(4.5 * shard_bytes / 1e9))
    alone = run(tmp_path / "alone", sources["store"], 1, *small)
    assert run(tmp_path / "two", sources["store"], 2, *small, *KILL) == alone
    assert run(tmp_path / "whole", sources["store"], 1) != alone
    other = paceline(
        *FLAGS, f"--data-dir={sources['store']}", "--processes=1", "--resume=auto", "--epochs=3",
        cwd=tmp_path / "alone", env={"PACELINE_CACHE": str(tmp_path / "alone" / "cache")},
    )  # fmt: skip
    assert other.code == 4
    assert "--cache-gb" in other.err
