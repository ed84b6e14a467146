"""Runs in an object store: mirrored during training, resumed on an empty machine, never stopped by a store."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from harness.cli import Answer, paceline
from harness.faulty_s3 import Fault, FaultyS3
from harness.processes import kill_all_in, started
from harness.runs import read_results, step_losses

pytestmark = pytest.mark.flows
NEEDS = ("s3fs", "moto")
# 8 steps an epoch, 24 in all; a checkpoint each epoch.
QUICK = (
    *("train", "synthetic-mlp", "--num-samples=600", "--input-size=32", "--hidden-size=16", "--epochs=3"),
    *("--global-batch-size=60", "--processes=1", "--track", "--log-frequency=1"),
)
A_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on a disk."""
    cwd = tmp_path_factory.mktemp("undisturbed")
    answer = paceline(*QUICK, "--output-dir=run", cwd=cwd)
    assert answer.code == 0, answer.err
    return cwd / "run"


@pytest.fixture
def bucket(s3: FaultyS3, request: pytest.FixtureRequest) -> str:
    return s3.make_bucket("b" + str(abs(hash(request.node.name))))


def train(s3: FaultyS3, bucket: str, cwd: Path, *flags: str, **extra: str) -> Answer:
    cwd.mkdir(exist_ok=True)
    url = f"--output-dir=s3://{bucket}/some/run"
    return paceline(*QUICK, url, *flags, cwd=cwd, env={**s3.environment(), **extra})


def working_copy(cwd: Path, bucket: str) -> Path:
    return cwd / "runs" / "s3" / bucket / "some" / "run"


def is_equal(folder: Path, undisturbed: Path) -> bool:
    """Every bit of the weights and of every loss is equal."""
    hashes = [read_results(path)["weights_sha256"] for path in (folder, undisturbed)]
    return hashes[0] == hashes[1] and step_losses(folder) == step_losses(undisturbed)


def checkpoint_files(folder: Path) -> dict[str, bytes]:
    paths = sorted((folder / "checkpoints").glob("step-*/*"))
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def assert_mirrored(s3: FaultyS3, bucket: str, folder: Path) -> None:
    """The store has the same checkpoints as the disk, bit for bit, and the same pointers."""
    names = [name.removeprefix("some/run/") for name in s3.names(bucket)]
    local = checkpoint_files(folder)
    assert [name for name in names if name.startswith("checkpoints/step-")] == sorted(local)
    assert all(s3.read(bucket, f"some/run/{name}") == content for name, content in local.items())
    for pointer in ("latest", "best"):
        target = (folder / "checkpoints" / pointer).readlink().name
        assert s3.read(bucket, f"some/run/checkpoints/{pointer}").decode().strip() == target
    for name in ("config.yaml", "environment.json", "metrics.jsonl", "metrics.csv", "results.json", "status.json"):
        assert s3.read(bucket, f"some/run/{name}") == (folder / name).read_bytes()


def status(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "status.json").read_text())
    return content


def test_a_stopped_run_resumes_from_the_store_on_an_empty_machine(
    s3: FaultyS3, bucket: str, tmp_path: Path, undisturbed: Path
) -> None:
    first = train(s3, bucket, tmp_path / "first", "--inject=stop rank=0 step=11")
    assert first.code == 75, first.err
    assert f"store     s3://{bucket}/some/run" in first.out
    assert f"the store has everything: s3://{bucket}/some/run, checkpoints up to step 1" in first.out
    stopped_at = status(working_copy(tmp_path / "first", bucket))["step"]
    shutil.rmtree(tmp_path / "first")

    second = train(s3, bucket, tmp_path / "second", "--resume=auto")
    assert second.code == 0, second.err
    folder = working_copy(tmp_path / "second", bucket)
    assert f"resumed   at step {stopped_at} from" in second.out
    assert is_equal(folder, undisturbed)
    assert_mirrored(s3, bucket, folder)
    assert status(folder)["mirror"] == "up to date, checkpoints up to step 24"
    assert f"output_dir: 's3://{bucket}/some/run'" in (folder / "config.yaml").read_text()
    log = s3.read(bucket, "some/run/logs/rank-0.log").decode()
    assert log.count("attempt 1") == 2  # the files of the first machine are still there


def test_all_files_reach_a_store_that_answers_with_500s(s3: FaultyS3, bucket: str, tmp_path: Path) -> None:
    # Some fail more often in a row than the three immediate retries, so that complete rounds fail.
    faults = [
        Fault("error", r"GET ", times=5, after=r"PUT .*/mirror.json"),
        Fault("error", r"PUT .*step-00000024/optimizer", times=4),
        Fault("error", r"PUT .*step-00000024/manifest", times=2),
        Fault("error", r"PUT .*(metrics|status|state|latest)", times=6),
    ]
    with s3.failing(*faults):
        answer = train(s3, bucket, tmp_path)
    assert answer.code == 0, answer.err
    assert [len(fault.fired) for fault in faults] == [5, 4, 2, 6]
    assert answer.err.count("is behind: ") == answer.err.count("has caught up") >= 1
    assert "internal error" in answer.err
    assert "the store has everything" in answer.out
    assert_mirrored(s3, bucket, working_copy(tmp_path, bucket))


def test_a_truncated_upload_never_counts_as_complete_under_another_launcher(
    s3: FaultyS3, bucket: str, tmp_path: Path, undisturbed: Path
) -> None:
    faults = [Fault("cut", r"PUT .*step-00000024/model", times=2), Fault("cut", r"PUT .*step-00000024/manifest")]
    with s3.failing(*faults):
        answer = train(s3, bucket, tmp_path, **A_RANK)
    assert answer.code == 0, answer.err
    assert [len(fault.fired) for fault in faults] == [2, 1]
    asked = [words for words in s3.requests if words.startswith(f"PUT /{bucket}") and "step-00000024/" in words]
    assert [words.rpartition("/")[2] for words in asked] == [
        *("model.safetensors", "model.safetensors", "model.safetensors", "optimizer.safetensors", "state.json"),
        *("manifest.json", "manifest.json"),  # sealed after the complete upload, and again after the truncation
    ]
    folder = working_copy(tmp_path, bucket)
    assert_mirrored(s3, bucket, folder)
    assert is_equal(folder, undisturbed)


def test_an_unreachable_store_does_not_stop_the_run_and_gets_its_files_later(
    s3: FaultyS3, bucket: str, tmp_path: Path, undisturbed: Path
) -> None:
    gone = Fault("gone", r".", times=10**6, after=r"PUT .*/mirror.json")  # after the claim
    held = "--inject=slow rank=0 step=13 seconds=6"  # so that training is running when the store fails
    with s3.failing(gone):
        answer = train(s3, bucket, tmp_path, held, PACELINE_STORE_TIMEOUT_S="1")
    assert answer.code == 0, answer.err
    assert gone.fired
    folder = working_copy(tmp_path, bucket)
    assert is_equal(folder, undisturbed)
    assert f"warning: s3://{bucket}/some/run is behind" in answer.err
    assert s3.names(bucket) == ["some/run/mirror.json"]
    behind = f"behind {len(list(folder.glob('checkpoints/step-*')))} checkpoints"
    assert f"s3://{bucket}/some/run IS {behind.upper()[:6]}: {behind[7:]} did not arrive" in answer.err
    command = f"paceline checkpoints {folder.relative_to(tmp_path)} --push"
    assert command in answer.err.splitlines()[-2]
    assert status(folder)["status"] == "finished"
    assert status(folder)["mirror"].startswith(f"{behind} since 20")
    assert f"{behind} since 20" in paceline("status", str(folder), cwd=tmp_path).out

    pushed = paceline(*command.split()[1:], cwd=tmp_path, env=s3.environment())
    assert pushed.code == 0, pushed.err
    assert_mirrored(s3, bucket, folder)
    assert status(folder)["mirror"] == "up to date, checkpoints up to step 24"


def test_killed_between_payload_and_manifest_the_checkpoint_before_is_used(
    s3: FaultyS3, bucket: str, tmp_path: Path, undisturbed: Path
) -> None:
    fault = Fault("hold", r"PUT .*step-00000016/manifest")
    first, second = tmp_path / "first", tmp_path / "second"
    assert train(s3, bucket, first, "--max-steps=8").code == 0
    flags = (f"--output-dir=s3://{bucket}/some/run", "--resume=auto", "--inject=slow rank=0 step=17 seconds=60")
    with s3.failing(fault), started(*QUICK, *flags, cwd=first, **s3.environment()):
        assert fault.is_reached.wait(60)
        assert kill_all_in(first) > 1
    names = s3.names(bucket)
    assert "some/run/checkpoints/step-00000016/state.json" in names
    assert "some/run/checkpoints/step-00000016/manifest.json" not in names
    shutil.rmtree(first)

    answer = train(s3, bucket, second, "--resume=auto")
    assert answer.code == 0, answer.err
    assert "step-00000016 in s3://" in answer.out
    assert "is not complete; the one before is used" in answer.out
    assert "resumed   at step 8 " in answer.out
    folder = working_copy(second, bucket)
    assert is_equal(folder, undisturbed)
    assert_mirrored(s3, bucket, folder)


def refused(answer: Answer, *words: str) -> None:
    assert answer.code == 2, answer.out + answer.err
    assert len(answer.err.splitlines()) <= 6
    assert all(word in answer.err for word in words), answer.err


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s4://bucket/run", ("there is no store s4://", "flag --output-dir")),
        ("gs://bucket/run", ("gs:// needs the package gcsfs", "pip install gcsfs")),
        ("s3://bucket", ("this URL names no run in a store", "s3://BUCKET/RUN")),
        ("s3://no-such-bucket/run", ("the store has no such bucket", "s3://no-such-bucket/run")),
    ],
)
def test_a_wrong_url_is_refused_quickly(s3: FaultyS3, tmp_path: Path, url: str, words: tuple[str, ...]) -> None:
    started_s = time.monotonic()
    refused(paceline(*QUICK, f"--output-dir={url}", cwd=tmp_path, env=s3.environment()), *words)
    assert time.monotonic() - started_s < 10  # two seconds on an idle machine
    assert list(tmp_path.iterdir()) == []


def test_a_store_without_credentials_is_refused(s3: FaultyS3, bucket: str, tmp_path: Path) -> None:
    without = {**s3.environment(), "AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "HOME": str(tmp_path)}
    answer = paceline(
        *QUICK, f"--output-dir=s3://{bucket}/run", cwd=tmp_path, env={"AWS_EC2_METADATA_DISABLED": "true", **without}
    )
    refused(answer, "requires credentials", "AWS_ACCESS_KEY_ID")


def test_a_store_that_does_not_answer_at_the_start_is_refused(s3: FaultyS3, tmp_path: Path) -> None:
    nowhere = {**s3.environment(), "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    answer = paceline(*QUICK, "--output-dir=s3://bucket/run", cwd=tmp_path, env=nowhere)
    refused(answer, "the store does not answer", "127.0.0.1:9", "AWS_ENDPOINT_URL")


def test_a_missing_package_is_named_with_a_fake_blocked_import(s3: FaultyS3, tmp_path: Path) -> None:
    (tmp_path / "s3fs.py").write_text("raise ImportError('blocked')\n")
    answer = paceline(
        *QUICK, "--output-dir=s3://bucket/run", cwd=tmp_path, PYTHONPATH=str(tmp_path), env=s3.environment()
    )
    refused(answer, "s3:// needs the package s3fs", "[s3]'")


def test_a_second_run_at_the_same_url_is_refused(s3: FaultyS3, bucket: str, tmp_path: Path) -> None:
    s3.write(bucket, "some/run/config.yaml", b"epochs: 3\n")
    refused(train(s3, bucket, tmp_path), "this store already holds a run", "--resume auto")
    assert s3.names(bucket) == ["some/run/config.yaml"]
