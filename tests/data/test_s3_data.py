"""Training from an S3 server: the weights of the folder, although the server fails, is slow and loses connections."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from harness.archive_files import make_pictures, write_webdataset
from harness.cli import Answer, paceline
from harness.faulty_s3 import Fault, FaultyS3
from harness.runs import read_results, step_losses

pytestmark = pytest.mark.flows
NEEDS = ("s3fs", "moto")
FLAGS = (
    *("train", "shapes-cnn", "--dataset=folder", "--image-size=28", "--global-batch-size=8", "--epochs=2", "--exact"),
    *("--lanes=2", "--track", "--log-frequency=1", "--save-steps=2", "--output-dir=run"),
)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pictures(tmp_path_factory.mktemp("pictures") / "set", {"train": 12, "test": 2})


@pytest.fixture(scope="module")
def bucket(s3: FaultyS3, pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    name = s3.make_bucket("pictures")
    for path in write_webdataset(pictures, tmp_path_factory.mktemp("shards"), 4).iterdir():
        s3.write(name, f"set/{path.name}", path.read_bytes())
    return f"s3://{name}/set"


def train(cwd: Path, data: str, s3: FaultyS3, *flags: str) -> Answer:
    cwd.mkdir(exist_ok=True)
    environment = {**s3.environment(), "PACELINE_CACHE": str(cwd / "cache")}
    return paceline(*FLAGS, f"--data-dir={data}", *flags, cwd=cwd, env=environment)


def test_a_store_that_fails_trains_the_weights_of_the_folder(
    s3: FaultyS3, bucket: str, pictures: Path, tmp_path: Path
) -> None:
    plain = train(tmp_path / "plain", str(pictures), s3, "--processes=1")
    assert plain.code == 0, plain.err
    faults = [
        Fault("error", r"GET .*train-000000", times=4),
        Fault("gone", r"GET .*train-000001", times=2),
        Fault("gone", r"GET .*test-", times=2),
    ]
    with s3.failing(*faults):
        stored = train(tmp_path / "stored", bucket, s3, "--processes=2", "--inject", "kill rank=1 step=3")
    assert stored.code == 0, stored.err
    assert [len(fault.fired) for fault in faults] == [4, 2, 2]
    results = [read_results(tmp_path / name / "run")["weights_sha256"] for name in ("plain", "stored")]
    assert results[0] == results[1]
    assert step_losses(tmp_path / "plain" / "run") == step_losses(tmp_path / "stored" / "run")
    # Without room, every picture is a request for its own bytes.
    before = len(s3.requests)
    direct = train(tmp_path / "direct", bucket, s3, "--processes=1", "--cache-gb=0", "--epochs=1")
    assert direct.code == 0, direct.err
    assert len(s3.requests) - before > 24
    assert not list((tmp_path / "direct" / "cache" / "data").glob("*.data"))


def test_a_store_that_is_not_there_is_explained_at_once(s3: FaultyS3, tmp_path: Path) -> None:
    began = time.monotonic()
    answer = train(tmp_path / "run", "s3://nowhere/set", s3, "--processes=1")
    assert answer.code == 2
    assert "no such bucket" in answer.err
    assert time.monotonic() - began < 20
