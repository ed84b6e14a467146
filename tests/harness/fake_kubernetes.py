"""A fake API server of a Kubernetes cluster (HTTP), and a kubeconfig for it.

The server stores objects and returns them; it runs nothing. Each test sets the states that a real cluster would
report.
"""

from __future__ import annotations

import json
import re
import threading
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

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
        self.absent: set[str] = set()  # kinds that this cluster does not have
        # For each log stream in order: what happens during the stream. By default the job ends.
        self.after_streams: list[Callable[[], None]] = []

    def add_pod(
        self,
        index: int,
        phase: str,
        *,
        code: int | None = None,
        waiting: str = "",
        must_end_by: str = "",
        disrupted: str = "",
    ) -> str:
        """Returns the name of the pod."""
        (job,) = [item for (plural, _), item in self.objects.items() if plural in ("jobs", "jobsets", "trainjobs")]
        count = len(self.objects)
        ended = {"terminated": {"exitCode": code, "finishedAt": f"2026-11-15T11:00:{count:02}Z"}}
        state: dict[str, Any] = ended if code is not None else {"running": {}}
        status: dict[str, Any] = {"phase": phase, "startTime": "2026-11-15T10:00:00Z"}
        if waiting:
            state = {"waiting": {"reason": waiting, "message": "Back-off pulling image"}}
        status["containerStatuses"] = [{"name": "train", "state": state}]
        if disrupted:
            status["conditions"] = [{"type": "DisruptionTarget", "status": "True", "reason": disrupted}]
        name = f"{job['metadata']['name']}-{index}-{count}"
        self.objects["pods", name] = {
            "metadata": {
                "name": name,
                "labels": job["metadata"]["labels"],
                "annotations": {INDEX: str(index)},
                "creationTimestamp": f"2026-11-15T10:00:{count:02}Z",
                **({"deletionTimestamp": must_end_by} if must_end_by else {}),
            },
            "spec": {"nodeName": "" if waiting else f"worker-{index}"},
            "status": status,
        }
        self.logs[name] = f"pod {index} begins\nstep 3/9  loss 2.3\n"
        return name

    def add_event(self, about: str, reason: str, message: str, *, kind: str = "Job", second: int = 0) -> None:
        """Add an event as the controllers of a cluster do."""
        self.objects["events", f"event-{len(self.objects)}"] = {
            "metadata": {"name": f"event-{len(self.objects)}"},
            "involvedObject": {"kind": kind, "name": about},
            "type": "Warning",
            "reason": reason,
            "message": message,
            "lastTimestamp": f"2026-11-15T10:00:{second:02}Z",
        }

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
        if refusal := self.server.refusals.get(f"GET {plural}"):
            self._fail(*refusal)
        elif name.endswith("/log"):
            self._send_log(name.removesuffix("/log"), query)
        elif name:
            self._hand_out((plural, name), self.server.objects.get((plural, name)))
        else:
            self._answer(200, {"kind": "List", "items": self._select(plural, query)})

    def _send_log(self, pod: str, query: dict[str, str]) -> None:
        lines = self.server.logs[pod].splitlines(keepends=True)
        if "tailLines" in query:
            lines = lines[-int(query["tailLines"]) :]
        if query.get("timestamps", "").lower() == "true":
            first = self.server.logs[pod].count("\n") - len(lines)
            lines = [f"2026-11-15T10:01:{first + n:02}.5Z {line}" for n, line in enumerate(lines)]
        if query.get("follow", "").lower() == "true":  # changes during the stream are visible after its end
            if self.server.after_streams:
                self.server.after_streams.pop(0)()
            else:
                self.server.set_condition("jobs", "Complete")
        self._answer(200, "".join(lines).encode())

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
        # Delete before answering: the client may read again at once.
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
        if query.get("fieldSelector", "").startswith("metadata.name="):
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


@contextmanager
def fake_cluster(folder: Path, set_variable: Callable[[str, str], None]) -> Iterator[FakeCluster]:
    """A cluster, and the environment variables of a user with access to it."""
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
        (folder / "kubeconfig").write_text(yaml.safe_dump(config))
        set_variable("KUBECONFIG", str(folder / "kubeconfig"))
        set_variable("NO_PROXY", "127.0.0.1")
        yield cluster
        cluster.shutdown()
