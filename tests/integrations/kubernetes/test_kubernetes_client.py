"""Submit, status, logs and cancel through the official client, with a fake cluster (an HTTP server).

The server stores objects and returns them. It runs nothing. Each test sets the states that a real cluster would
report.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from harness.fake_kubernetes import PLURALS, FakeCluster, fake_cluster
from harness.fake_slurm import clean_home
from paceline.cli.main import main

pytestmark = pytest.mark.flows
NEEDS = ("kubernetes",)
USER, DATA, INTERNAL = 2, 3, 70
IMAGE = "registry.example.com/team/paceline:0.1.0"
JOB = [*("shapes-cnn", "--image", IMAGE, "--runs", "paceline-runs", "--nodes", "2", "--processes-per-node", "2")]
JOB += ["--output-dir", "runs/demo"]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    clean_home(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    with fake_cluster(tmp_path, monkeypatch.setenv) as cluster:
        yield cluster


def submit(*arguments: str) -> int:
    return main(["submit", "kubernetes", *arguments])


def status_of_run(capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(["status", "runs/demo"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(("api", "kind"), [("job", "Job"), ("jobset", "JobSet"), ("trainjob", "TrainJob")])
def test_submitted_to_a_fake_cluster(
    api: str, kind: str, fake: FakeCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text("dataset: shapes\nmodel_name: cnn\n")
    assert submit("mine.yaml", *JOB[1:], "--api", api) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert f"{api} demo is in namespace vision: 4 ranks on 2 nodes" in out
    manifest = list(yaml.safe_load_all((tmp_path / "runs" / "demo" / "job.yaml").read_text()))
    for item in manifest:  # the stored manifest equals the submitted one
        sent = json.loads(json.dumps(fake.the(PLURALS[item["kind"]])))
        sent["metadata"].pop("uid")
        owners = sent["metadata"].pop("ownerReferences", None)
        if item["kind"] != kind:  # and is deleted with the job
            assert [(owner["kind"], owner["uid"]) for owner in owners] == [(kind, "uid-of-demo")]
        assert sent == item
    secret = fake.the("secrets")  # not in the file, and deleted with the job
    assert [owner["uid"] for owner in secret["metadata"]["ownerReferences"]] == ["uid-of-demo"]
    (value,) = secret["stringData"].values()
    assert len(value) == 64
    written = [path.read_text() for path in (tmp_path / "runs" / "demo").rglob("*") if path.is_file()]
    assert not any(value in text for text in [*written, out])
    record = json.loads((tmp_path / "runs" / "demo" / "job.json").read_text())
    assert (record["scheduler"], record["namespace"], record["api"]) == ("kubernetes", "vision", api)


def test_the_states_of_a_fake_cluster_become_a_status(fake: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(*JOB) == 0
    assert "queued" in status_of_run(capsys)
    fake.add_pod(0, "Running")
    fake.add_pod(1, "Pending", waiting="ImagePullBackOff")
    text = status_of_run(capsys)
    assert "runs/demo: queued" in text
    assert "demo: pending (1 of 2 pods run; ImagePullBackOff: Back-off pulling image) on worker-0" in text
    fake.add_pod(1, "Running")  # its successor
    text = status_of_run(capsys)
    assert "runs/demo: running" in text
    assert "demo: running on worker-0,worker-1 for " in text
    assert "said:     step 3/9  loss 2.3" in text
    fake.set_condition("jobs", "Complete")
    assert "runs/demo: finished" in status_of_run(capsys)


def test_a_failure_in_a_fake_cluster(fake: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(*JOB) == 0
    fake.add_pod(0, "Failed", code=3)
    fake.set_condition("jobs", "Failed", "PodFailurePolicy", "Container train for pod vision/demo-0 failed")
    text = status_of_run(capsys)
    assert "runs/demo: failed" in text
    assert "(PodFailurePolicy: Container train for pod vision/demo-0 failed)" in text
    assert "exit code 3" in text
    assert main(["watch", "runs/demo", "--every-s", "0"]) == DATA


def test_in_a_queue_of_a_fake_cluster(fake: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(*JOB, "--queue", "team") == 0
    text = status_of_run(capsys)
    assert "runs/demo: queued" in text
    assert "pending (in queue team)" in text


def test_logs_of_a_fake_cluster(fake: FakeCluster, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert submit(*JOB) == 0
    assert main(["logs", "runs/demo"]) == USER
    assert b"there is no pod 0 of this job" in capfdbinary.readouterr().err
    fake.add_pod(0, "Running")
    fake.add_pod(1, "Running")
    capfdbinary.readouterr()
    assert main(["logs", "runs/demo"]) == 0
    assert capfdbinary.readouterr().out == b"pod 0 begins\nstep 3/9  loss 2.3\n"
    assert main(["logs", "runs/demo", "--follow"]) == 0
    assert capfdbinary.readouterr().out == b"pod 0 begins\nstep 3/9  loss 2.3\n"
    assert main(["logs", "runs/demo", "--job"]) == 0
    out = capfdbinary.readouterr().out
    assert [line for line in out.splitlines() if b"pod" in line] == [
        *(b"==> pod 0 <==", b"pod 0 begins", b"==> pod 1 <==", b"pod 1 begins"),
    ]
    assert main(["logs", "runs/demo", "--rank", "1"]) == USER
    assert b"which only the cluster sees" in capfdbinary.readouterr().err


def test_cancelled_in_a_fake_cluster(fake: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(*JOB) == 0
    fake.add_pod(0, "Running")
    fake.add_pod(1, "Running")
    capsys.readouterr()
    assert main(["cancel", "runs/demo"]) == 0
    assert "job demo is cancelled; it saves before it ends" in capsys.readouterr().out
    assert any("Foreground" in call for call in fake.calls)  # pods are deleted first, with their grace
    assert ("jobs", "demo") not in fake.objects
    assert "runs/demo: cancelled" in status_of_run(capsys)
    assert main(["cancel", "runs/demo"]) == 0
    assert "nothing to cancel" in capsys.readouterr().out


def test_a_run_has_one_job_in_a_fake_cluster(
    fake: FakeCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(*JOB) == 0
    assert submit(*JOB, "--resume", "auto") == USER
    assert "this run has a job already" in capsys.readouterr().err
    fake.set_condition("jobs", "Failed", "BackoffLimitExceeded")
    assert submit(*JOB, "--resume", "auto") == 0  # with its own name
    assert {name for kind, name in fake.objects if kind == "jobs"} == {"demo", "demo-2"}
    assert json.loads((tmp_path / "runs" / "demo" / "job.json").read_text())["earlier"] == ["demo"]


def test_a_long_name_of_a_second_job_in_a_fake_cluster_keeps_its_number(fake: FakeCluster) -> None:
    """The number at the end distinguishes the second job of a run, for any length of the folder's name."""
    words = [*JOB[:-1], "runs/" + "1" * 70]
    assert submit(*words) == 0
    fake.set_condition("jobs", "Failed", "BackoffLimitExceeded")
    assert submit(*words, "--resume", "auto") == 0
    assert {name for kind, name in fake.objects if kind == "jobs"} == {"run-" + "1" * 46, "run-" + "1" * 44 + "-2"}


REFUSALS = {
    "forbidden": (403, 'jobs.batch is forbidden: User "me" cannot create', "the cluster does not let you", "can-i"),
    "no namespace": (404, 'namespaces "vision" not found', "there is no such namespace", "--namespace"),
    "invalid": (422, "Job.batch is invalid: spec.x", "the cluster refuses the job", "spec.x"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refused_by_a_fake_cluster(
    case: str, fake: FakeCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, message, *expected = REFUSALS[case]
    fake.refusals["POST jobs"] = (code, message)
    assert submit(*JOB) == USER
    screen = capsys.readouterr().err
    for text in (*expected, message):
        assert text in screen, screen
    assert not (tmp_path / "runs" / "demo").exists()


def test_a_failed_submission_leaves_no_object_in_a_fake_cluster(
    fake: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.refusals["POST services"] = (403, "services is forbidden")
    assert submit(*JOB) == USER
    assert "services is forbidden" in capsys.readouterr().err
    assert fake.objects == {}


def test_an_operator_that_a_fake_cluster_lacks(fake: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    fake.absent = {"jobsets"}
    assert submit(*JOB, "--api", "jobset") == USER
    screen = capsys.readouterr().err
    assert "the cluster has no JobSets" in screen
    assert "--api job" in screen


def test_a_fake_cluster_that_is_unreachable(fake: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(*JOB) == 0
    fake.shutdown()
    fake.server_close()
    assert "the cluster does not answer" in status_of_run(capsys)
    assert main(["cancel", "runs/demo"]) == INTERNAL
    assert "kubectl delete job demo" in capsys.readouterr().err


def test_a_context_that_is_not_in_the_kubeconfig(fake: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(*JOB, "--context", "there") == USER
    screen = capsys.readouterr().err
    assert "there is no cluster to talk to" in screen
    assert "context there" in screen
