"""Submit, status, logs and cancel through the official client, against an HTTP server that stands in for a cluster.

The server keeps objects and hands them out again; it runs nothing. What a real cluster would answer in a state is
written down by each test.
"""

from __future__ import annotations

import json
import re
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.fake_slurm import clean_home
from paceline.cli.main import main

pytestmark = pytest.mark.flows
NEEDS = ("kubernetes",)
USER, INTERNAL = 2, 70
IMAGE = "registry.example.com/team/paceline:0.1.0"
JOB = [*("shapes-cnn", "--image", IMAGE, "--runs", "paceline-runs", "--nodes", "2", "--processes-per-node", "2")]
JOB += ["--output-dir", "runs/ride"]
INDEX = "batch.kubernetes.io/job-completion-index"
PLURALS = {
    "Job": "jobs",
    "JobSet": "jobsets",
    "TrainJob": "trainjobs",
    "Service": "services",
    "ConfigMap": "configmaps",
    "NetworkPolicy": "networkpolicies",
    "ServiceAccount": "serviceaccounts",
}


class FakeCluster(ThreadingHTTPServer):
    """The paths of the API that jobs need, over objects in memory."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}  # by plural and name
        self.logs: dict[str, str] = {}
        self.calls: list[str] = []
        self.refusals: dict[str, tuple[int, str]] = {}  # "POST jobs": status and message
        self.absent: set[str] = set()  # kinds this cluster does not know

    def add_pod(self, index: int, phase: str, *, code: int | None = None, waiting: str = "") -> None:
        (job,) = [item for (plural, _), item in self.objects.items() if plural in ("jobs", "jobsets", "trainjobs")]
        state: dict[str, Any] = {"terminated": {"exitCode": code}} if code is not None else {"running": {}}
        status: dict[str, Any] = {"phase": phase, "startTime": "2026-11-15T10:00:00Z"}
        if waiting:
            state = {"waiting": {"reason": waiting, "message": "Back-off pulling image"}}
        status["containerStatuses"] = [{"name": "train", "state": state}]
        name = f"{job['metadata']['name']}-{index}-{len(self.objects)}"
        self.objects["pods", name] = {
            "metadata": {
                "name": name,
                "labels": job["metadata"]["labels"],
                "annotations": {INDEX: str(index)},
                "creationTimestamp": f"2026-11-15T10:00:{len(self.objects):02}Z",
            },
            "spec": {"nodeName": "" if waiting else f"worker-{index}"},
            "status": status,
        }
        self.logs[name] = f"pod {index} begins\nstep 3/9  loss 2.3\n"

    def the(self, plural: str) -> dict[str, Any]:
        (found,) = [item for (kind, _), item in self.objects.items() if kind == plural]
        return found

    def set_condition(self, plural: str, kind: str, reason: str = "", message: str = "") -> None:
        row = {"type": kind, "status": "True", "reason": reason, "message": message}
        self.the(plural)["status"] = {"conditions": [row]}


class _Handler(BaseHTTPRequestHandler):
    server: FakeCluster

    def do_GET(self) -> None:
        plural, name, query = self._read()
        if name.endswith("/log"):
            self._answer(200, self.server.logs[name.removesuffix("/log")].encode())
        elif name:
            self._hand_out((plural, name), self.server.objects.get((plural, name)))
        else:
            self._answer(200, {"kind": "List", "items": self._select(plural, query)})

    def do_POST(self) -> None:
        plural, _, _ = self._read()
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        key = (plural, body["metadata"]["name"])
        if key in self.server.objects:
            self._fail(409, f'{plural} "{key[1]}" already exists')
        elif plural in self.server.absent:
            self._fail(404, "the server could not find the requested resource")
        elif refusal := self.server.refusals.get(f"POST {plural}"):
            self._fail(*refusal)
        else:
            body["metadata"]["uid"] = f"uid-of-{key[1]}"
            self.server.objects[key] = body
            self._answer(201, body)

    def do_DELETE(self) -> None:
        plural, name, query = self._read()
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.calls.append(f"{query.get('propagationPolicy')} {body.decode()}")
        # Gone before the answer is: who was answered may look at once.
        self._hand_out((plural, name), self.server.objects.pop((plural, name), None))

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def _read(self) -> tuple[str, str, dict[str, str]]:
        url = urllib.parse.urlsplit(self.path)
        match = re.fullmatch(r"/(?:api/v1|apis/[^/]+/[^/]+)/namespaces/([^/]+)/([^/]+)/?(.*)", url.path)
        assert match is not None, self.path
        self.server.calls.append(f"{self.command} {match[1]} {match[2]} {match[3]}".strip())
        return match[2], match[3], dict(urllib.parse.parse_qsl(url.query))

    def _select(self, plural: str, query: dict[str, str]) -> list[dict[str, Any]]:
        items = [item for (kind, _), item in self.server.objects.items() if kind == plural]
        if "labelSelector" in query:
            key, _, value = query["labelSelector"].partition("=")
            items = [item for item in items if item["metadata"]["labels"].get(key) == value]
        if "fieldSelector" in query:
            name = query["fieldSelector"].removeprefix("metadata.name=")
            items = [item for item in items if item["metadata"]["name"] == name]
        return items

    def _hand_out(self, key: tuple[str, str], item: dict[str, Any] | None) -> None:
        if item is not None:
            self._answer(200, item)
        else:
            self._fail(404, f'{key[0]} "{key[1]}" not found')

    def _fail(self, code: int, message: str) -> None:
        self._answer(code, {"kind": "Status", "status": "Failure", "message": message, "code": code})

    def _answer(self, code: int, content: object) -> None:
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "text/plain" if isinstance(content, bytes) else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCluster]:
    clean_home(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    with FakeCluster() as cluster:
        threading.Thread(target=cluster.serve_forever, args=(0.02,), daemon=True).start()
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{cluster.server_port}"}}],
            "users": [{"name": "me", "user": {"token": "none"}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me", "namespace": "vision"}}],
        }
        (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield cluster
        cluster.shutdown()


def submit(*arguments: str) -> int:
    return main(["submit", "kubernetes", *arguments])


def status_of_run(capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(["status", "runs/ride"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(("api", "kind"), [("job", "Job"), ("jobset", "JobSet"), ("trainjob", "TrainJob")])
def test_submitted_to_a_fake_cluster(
    api: str, kind: str, fake: FakeCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text("dataset: shapes\nmodel_name: cnn\n")
    assert submit("mine.yaml", *JOB[1:], "--api", api) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert f"{api} ride is in namespace vision: 4 ranks on 2 nodes" in out
    manifest = list(yaml.safe_load_all((tmp_path / "runs" / "ride" / "job.yaml").read_text()))
    for item in manifest:  # what was written down is what was sent
        sent = json.loads(json.dumps(fake.the(PLURALS[item["kind"]])))
        sent["metadata"].pop("uid")
        owners = sent["metadata"].pop("ownerReferences", None)
        if item["kind"] != kind:  # and goes when the job goes
            assert [(owner["kind"], owner["uid"]) for owner in owners] == [(kind, "uid-of-ride")]
        assert sent == item
    secret = fake.the("secrets")  # not written down, and gone with the job
    assert [owner["uid"] for owner in secret["metadata"]["ownerReferences"]] == ["uid-of-ride"]
    (value,) = secret["stringData"].values()
    assert len(value) == 64
    written = [path.read_text() for path in (tmp_path / "runs" / "ride").rglob("*") if path.is_file()]
    assert not any(value in text for text in [*written, out])
    record = json.loads((tmp_path / "runs" / "ride" / "job.json").read_text())
    assert (record["scheduler"], record["namespace"], record["api"]) == ("kubernetes", "vision", api)


def test_what_a_fake_cluster_says_becomes_a_status(fake: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(*JOB) == 0
    assert "queued" in status_of_run(capsys)
    fake.add_pod(0, "Running")
    fake.add_pod(1, "Pending", waiting="ImagePullBackOff")
    text = status_of_run(capsys)
    assert "runs/ride: queued" in text
    assert "ride: pending (1 of 2 pods run; ImagePullBackOff: Back-off pulling image) on worker-0" in text
    fake.add_pod(1, "Running")  # its successor
    text = status_of_run(capsys)
    assert "runs/ride: running" in text
    assert "ride: running on worker-0,worker-1 for " in text
    assert "said:     step 3/9  loss 2.3" in text
    fake.set_condition("jobs", "Complete")
    assert "runs/ride: finished" in status_of_run(capsys)


def test_a_failure_in_a_fake_cluster(fake: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(*JOB) == 0
    fake.add_pod(0, "Failed", code=3)
    fake.set_condition("jobs", "Failed", "PodFailurePolicy", "Container train for pod vision/ride-0 failed")
    text = status_of_run(capsys)
    assert "runs/ride: failed" in text
    assert "(PodFailurePolicy: Container train for pod vision/ride-0 failed)" in text
    assert "exit code 3" in text
    assert main(["watch", "runs/ride", "--every", "0"]) == INTERNAL


def test_in_a_queue_of_a_fake_cluster(fake: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(*JOB, "--queue", "team") == 0
    text = status_of_run(capsys)
    assert "runs/ride: queued" in text
    assert "pending (in queue team)" in text


def test_logs_of_a_fake_cluster(fake: FakeCluster, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert submit(*JOB) == 0
    assert main(["logs", "runs/ride"]) == USER
    assert b"there is no pod 0 of this job" in capfdbinary.readouterr().err
    fake.add_pod(0, "Running")
    fake.add_pod(1, "Running")
    capfdbinary.readouterr()
    assert main(["logs", "runs/ride"]) == 0
    assert capfdbinary.readouterr().out == b"pod 0 begins\nstep 3/9  loss 2.3\n"
    assert main(["logs", "runs/ride", "--follow"]) == 0
    assert capfdbinary.readouterr().out == b"pod 0 begins\nstep 3/9  loss 2.3\n"
    assert main(["logs", "runs/ride", "--job"]) == 0
    out = capfdbinary.readouterr().out
    assert [line for line in out.splitlines() if b"pod" in line] == [
        *(b"==> pod 0 <==", b"pod 0 begins", b"==> pod 1 <==", b"pod 1 begins"),
    ]
    assert main(["logs", "runs/ride", "--rank", "1"]) == USER
    assert b"which only the cluster sees" in capfdbinary.readouterr().err


def test_cancelled_in_a_fake_cluster(fake: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(*JOB) == 0
    fake.add_pod(0, "Running")
    fake.add_pod(1, "Running")
    capsys.readouterr()
    assert main(["cancel", "runs/ride"]) == 0
    assert "job ride is cancelled; it saves before it ends" in capsys.readouterr().out
    assert any("Foreground" in call for call in fake.calls)  # pods go first, with their grace
    assert ("jobs", "ride") not in fake.objects
    assert "runs/ride: cancelled" in status_of_run(capsys)
    assert main(["cancel", "runs/ride"]) == 0
    assert "nothing to cancel" in capsys.readouterr().out


def test_a_run_has_one_job_in_a_fake_cluster(
    fake: FakeCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit(*JOB) == 0
    assert submit(*JOB, "--resume", "auto") == USER
    assert "this run has a job already" in capsys.readouterr().err
    fake.set_condition("jobs", "Failed", "BackoffLimitExceeded")
    assert submit(*JOB, "--resume", "auto") == 0  # under a name of its own
    assert {name for kind, name in fake.objects if kind == "jobs"} == {"ride", "ride-2"}
    assert json.loads((tmp_path / "runs" / "ride" / "job.json").read_text())["earlier"] == ["ride"]


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
    assert not (tmp_path / "runs" / "ride").exists()


def test_no_half_of_a_job_stays_in_a_fake_cluster(fake: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    fake.refusals["POST services"] = (403, "services is forbidden")
    assert submit(*JOB) == USER
    assert "services is forbidden" in capsys.readouterr().err
    assert fake.objects == {}


def test_an_operator_that_a_fake_cluster_lacks(fake: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    fake.absent = {"jobsets"}
    assert submit(*JOB, "--api", "jobset") == USER
    screen = capsys.readouterr().err
    assert "the cluster knows no JobSets" in screen
    assert "--api job" in screen


def test_a_fake_cluster_that_went_away(fake: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(*JOB) == 0
    fake.shutdown()
    fake.server_close()
    assert "the cluster does not answer" in status_of_run(capsys)
    assert main(["cancel", "runs/ride"]) == INTERNAL
    assert "kubectl delete job ride" in capsys.readouterr().err


def test_a_context_that_is_not_in_the_kubeconfig(fake: FakeCluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit(*JOB, "--context", "there") == USER
    screen = capsys.readouterr().err
    assert "there is no cluster to talk to" in screen
    assert "context there" in screen
