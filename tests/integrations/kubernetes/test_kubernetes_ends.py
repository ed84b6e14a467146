"""How a job ends, is deleted or is removed by its TTL, and its logs, with a fake cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.fake_kubernetes import FakeCluster, fake_cluster
from harness.fake_slurm import clean_home
from paceline.cli.main import main
from paceline.integrations.kubernetes import logs as kubernetes_logs

pytestmark = [pytest.mark.flows, pytest.mark.timeout(60)]
NEEDS = ("kubernetes",)
USER, INTERNAL = 2, 70
JOB = [*("shapes-cnn", "--image", "team/paceline:0.1.0", "--runs", "paceline-runs", "--nodes", "2")]
JOB += ["--processes-per-node", "2", "--output-dir", "runs/demo"]
LONG_AGO = "2026-11-15T10:30:00Z"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    clean_home(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(kubernetes_logs, "_POLL_S", 0.01)
    with fake_cluster(tmp_path, monkeypatch.setenv) as cluster:
        yield cluster


def submit(*more: str) -> None:
    assert main(["submit", "kubernetes", *JOB, *more]) == 0


def status(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["status", "runs/demo", "--json"]) == 0
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return content


# --- Exit codes and counts --------------------------------------------------------------------------------------------


def test_the_code_that_ended_the_job_of_a_fake_cluster_is_shown(
    fake: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pod that was stopped earlier does not hide the pod whose error ended the job."""
    submit()
    fake.add_pod(0, "Failed", code=75)
    fake.add_pod(1, "Failed", code=2)
    fake.set_condition("jobs", "Failed", "PodFailurePolicy")
    assert status(capsys)["job"]["exit_code"] == "2"
    assert main(["watch", "runs/demo", "--every-s", "0"]) == USER


def test_pods_that_the_controller_of_a_fake_cluster_ended_are_no_failures(
    fake: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """`failed` of a Job counts stopped, evicted and deleted pods. `status` counts only what the retries count."""
    submit()
    fake.add_pod(0, "Failed", code=75)
    fake.add_pod(1, "Failed", code=137, disrupted="EvictionByEvictionAPI")
    fake.add_pod(1, "Failed", code=70)
    fake.add_pod(0, "Failed", code=143, must_end_by=LONG_AGO)
    fake.set_condition("jobs", "Failed", "BackoffLimitExceeded")
    fake.the("jobs")["status"]["failed"] = 4
    job = status(capsys)["job"]
    assert (job["restarts"], job["exit_code"]) == (1, "70")


def test_a_deadline_of_a_fake_cluster_has_no_exit_code(fake: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    """A failure a week ago is not the reason of a time limit."""
    submit()
    fake.add_pod(1, "Failed", code=70)
    fake.set_condition("jobs", "Failed", "DeadlineExceeded")
    assert status(capsys)["job"]["exit_code"] == ""


def test_a_job_with_a_missing_pod_of_a_fake_cluster_is_not_running(
    fake: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job of two pods with only one of them is not running."""
    submit()
    fake.add_pod(0, "Running")
    content = status(capsys)
    assert (content["state"], content["job"]["reason"]) == ("queued", "1 of 2 pods run")


# --- Cancelled, finished and removed ----------------------------------------------------------------------------------


def test_a_cancelled_job_of_a_fake_cluster_is_stopping_until_its_pods_end(
    fake: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """After cancel a run is neither queued nor ended while its pods save."""
    submit()
    fake.add_pod(0, "Running")
    fake.add_pod(1, "Running")
    job = fake.the("jobs")
    assert main(["cancel", "runs/demo"]) == 0
    # A foreground deletion keeps the job until its pods have ended.
    fake.objects["jobs", "demo"] = job
    job["metadata"]["deletionTimestamp"] = LONG_AGO
    content = status(capsys)
    assert (content["state"], content["is_over"]) == ("stopping", False)
    del fake.objects["jobs", "demo"]
    content = status(capsys)
    assert (content["state"], content["is_over"]) == ("cancelled", True)


@pytest.mark.parametrize(
    ("condition", "state", "code"), [("Complete", "finished", 0), ("Failed", "failed", USER)], ids=["done", "failed"]
)
def test_the_outcome_is_kept_after_the_job_is_removed_from_a_fake_cluster(
    condition: str, state: str, code: int, fake: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """After the TTL the cluster has removed the job. The recorded outcome stays."""
    submit()
    fake.add_pod(0, "Failed" if code else "Succeeded", code=code)
    fake.set_condition("jobs", condition, "PodFailurePolicy" if code else "")
    assert status(capsys)["state"] == state
    fake.objects.clear()
    content = status(capsys)
    assert (content["state"], content["is_over"]) == (state, True)
    assert main(["watch", "runs/demo", "--every-s", "0"]) == code


def test_a_job_that_a_fake_cluster_removed_before_a_status_has_ended(
    fake: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a `status` before the TTL, the outcome is unknown. The run does not count as lost."""
    submit()
    fake.objects.clear()
    content = status(capsys)
    assert (content["state"], content["is_over"]) == ("ended", True)
    assert main(["watch", "runs/demo", "--every-s", "0"]) == INTERNAL


def test_a_fake_cluster_that_cannot_be_reached_leaves_no_run_folder(
    fake: FakeCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run folder without a job would look like a run."""
    fake.shutdown()
    fake.server_close()
    assert main(["submit", "kubernetes", *JOB]) == INTERNAL
    assert not (tmp_path / "runs").exists()


# --- Logs -------------------------------------------------------------------------------------------------------------


def logs(capfdbinary: pytest.CaptureFixture[bytes], *flags: str) -> bytes:
    capfdbinary.readouterr()
    assert main(["logs", "runs/demo", *flags]) == 0
    return capfdbinary.readouterr().out


def test_logs_of_a_remaining_pod_in_a_fake_cluster(
    fake: FakeCluster, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """The controller has deleted pod 0. The log of pod 1 still exists."""
    submit()
    fake.add_pod(1, "Failed", code=70)
    fake.set_condition("jobs", "Failed", "BackoffLimitExceeded")
    assert logs(capfdbinary).startswith(b"pod 1 begins\n")
    assert logs(capfdbinary, "--follow").startswith(b"pod 1 begins\n")


def test_logs_of_replaced_pods_of_a_fake_cluster(fake: FakeCluster, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """--job shows every pod, including replaced ones. A successor that waits does not hide the pod before it."""
    submit()
    first = fake.add_pod(0, "Failed", code=70)
    fake.add_pod(1, "Running")
    fake.add_pod(0, "Pending", waiting="ContainerCreating")
    fake.logs[first] = "the reason\n"
    assert logs(capfdbinary) == b"the reason\n"
    heads = [line for line in logs(capfdbinary, "--job").splitlines() if line.startswith(b"==>")]
    assert heads == [b"==> pod 0 <==", b"==> pod 1 <=="]
    last = fake.add_pod(0, "Running")
    heads = [line for line in logs(capfdbinary, "--job").splitlines() if line.startswith(b"==>")]
    assert heads == [
        *(f"==> pod 0: {first}, exit code 70 <==".encode(), f"==> pod 0: {last} <==".encode(), b"==> pod 1 <=="),
    ]


def test_a_broken_log_stream_of_a_fake_cluster_continues(
    fake: FakeCluster, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """Each line is shown once, over broken streams and a replaced pod, until the job has ended."""
    submit()
    first = fake.add_pod(0, "Running")
    fake.add_pod(1, "Running")

    def more() -> None:
        fake.logs[first] += "step 4/9\n"

    def replace() -> None:
        fake.objects["pods", first]["status"]["phase"] = "Failed"
        fake.logs[fake.add_pod(0, "Running")] = "again\n"

    fake.after_streams = [more, replace, lambda: None, lambda: fake.set_condition("jobs", "Complete")]
    assert logs(capfdbinary, "--follow") == b"pod 0 begins\nstep 3/9  loss 2.3\nstep 4/9\nagain\n"


def test_a_log_is_followed_with_the_timeouts_that_client_37_takes_from_a_fake_cluster(
    fake: FakeCluster, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 37 of the client checks `_request_timeout`: a number above 0, or two of them."""
    from kubernetes.client import CoreV1Api

    read = CoreV1Api.read_namespaced_pod_log
    seen = []

    def checked(self: CoreV1Api, *arguments: Any, **options: Any) -> Any:
        seen.append(options["_request_timeout"])
        assert all(type(number) in (int, float) and number > 0 for number in seen[-1])
        return read(self, *arguments, **options)

    monkeypatch.setattr(CoreV1Api, "read_namespaced_pod_log", checked)
    submit()
    fake.add_pod(0, "Running")
    fake.add_pod(1, "Running")
    assert logs(capfdbinary, "--follow").startswith(b"pod 0 begins\n")
    assert seen


# --- Pods that cannot start, or cannot end ----------------------------------------------------------------------------


def test_a_dead_node_of_a_fake_cluster(fake: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    """A pod in Terminating is not running. After its grace is long over, the manual step is suggested."""
    submit()
    fake.add_pod(0, "Running")
    name = fake.add_pod(1, "Running", must_end_by="2999-01-01T00:00:00Z")
    content = status(capsys)
    assert (content["state"], content["job"]["state"]) == ("queued", "PENDING")
    assert "taint" not in content["job"]["reason"]
    fake.objects["pods", name]["metadata"]["deletionTimestamp"] = LONG_AGO
    reason = status(capsys)["job"]["reason"]
    assert "kubectl taint nodes worker-1 node.kubernetes.io/out-of-service=nodeshutdown:NoExecute" in reason
    assert f"kubectl delete pod {name} --force --grace-period=0" in reason
    fake.add_pod(1, "Running")  # its successor, while the old object is still there
    assert status(capsys)["state"] == "running"


FAILED_CREATES = {
    "service account": 'pods "demo-0-" is forbidden: error looking up service account vision/trainer: not found',
    "priority class": 'pods "demo-0-" is forbidden: no PriorityClass with name high was found',
    "quota": 'pods "demo-0-x" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=8',
    "PodSecurity": 'pods "demo-0-x" is forbidden: violates PodSecurity "restricted:latest": hostPath volumes',
}


@pytest.mark.parametrize("case", FAILED_CREATES)
@pytest.mark.parametrize("api", ["job", "jobset"])
def test_a_job_without_pods_gets_its_reason_from_events_of_a_fake_cluster(
    api: str, case: str, fake: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pod that the API server refuses exists only as an event of its Job."""
    submit("--api", api)
    about = "demo" if api == "job" else "demo-node-0"
    fake.add_event("another", "FailedCreate", "not ours", second=9)
    fake.add_event(about, "BackOff", "not about creation", second=8)
    fake.add_event(about, "FailedCreate", "an older reason", second=1)
    fake.add_event(about, "FailedCreate", FAILED_CREATES[case], second=2)
    assert status(capsys)["job"]["reason"] == f"no pod yet; FailedCreate: {FAILED_CREATES[case]}"


def test_status_works_without_the_right_to_read_events_of_a_fake_cluster(
    fake: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """Events are optional."""
    submit()
    fake.refusals["GET events"] = (403, 'events is forbidden: User "me" cannot list resource "events"')
    assert status(capsys)["job"]["reason"] == "no pod yet"


WEBHOOKS = {
    "runtime": 'admission webhook "validator.trainjob.trainer.kubeflow.org" denied the request: runtimeRef',
    "jobset": 'admission webhook "vjobset.kb.io" denied the request: JobSet name is too long',
    "policy": "ValidatingAdmissionPolicy 'images' with binding 'all' denied request: failed admission policy",
}


@pytest.mark.parametrize("case", WEBHOOKS)
@pytest.mark.parametrize("code", [400, 403])
def test_a_denial_by_a_webhook_of_a_fake_cluster_is_not_a_missing_right(
    code: int, case: str, fake: FakeCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """A webhook may answer 403; the message is about the job."""
    fake.refusals["POST trainjobs"] = (code, WEBHOOKS[case])
    assert main(["submit", "kubernetes", *JOB, "--api", "trainjob"]) == USER
    screen = capsys.readouterr().err
    assert "the cluster refuses the job" in screen
    assert "can-i" not in screen
    assert "clustertrainingruntimes" in screen
