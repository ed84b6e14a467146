"""The official Kubernetes client, as far as a job needs it: create, look, read logs, delete.

Jobs, JobSets and TrainJobs are asked for by one generic interface, so all three are plain dictionaries here.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from paceline.errors import PacelineError, UserError
from paceline.launch.job_record import JobRecord
from paceline.launch.kubernetes_access import NAME_LABEL, build_secret
from paceline.launch.kubernetes_job import KubernetesJob
from paceline.launch.kubernetes_manifest import CONTAINER, INDEX, build_objects
from paceline.launch.slurm_client import JobState
from paceline.world.secret import create_secret

_TIMEOUT_S = (5, 20)  # to connect, and between two bytes
_KINDS = {  # group, version, plural
    "job": ("batch", "v1", "jobs"),
    "jobset": ("jobset.x-k8s.io", "v1alpha2", "jobsets"),
    "trainjob": ("trainer.kubeflow.org", "v1alpha1", "trainjobs"),
}
_OPERATORS = {"jobset": "JobSets", "trainjob": "TrainJobs: Kubeflow Trainer v2 is not installed"}


class ClusterUnavailable(PacelineError):
    """The cluster did not answer, or not to us."""


@dataclass(frozen=True)
class Cluster:
    """A namespace of a cluster, by a context of the kubeconfig (empty: the current one)."""

    context: str = ""
    given_namespace: str = ""

    @cached_property
    def _client(self) -> Any:
        require_client()
        from kubernetes import config

        try:
            return config.new_client_from_config(_kubeconfig(), context=self.context or None)
        except config.ConfigException as error:
            raise UserError(
                "there is no cluster to talk to",
                where="the kubeconfig" + (f", context {self.context}" if self.context else ""),
                got=str(error).splitlines()[0],
                hint="kubectl config get-contexts lists them; --dry-run prints the manifest anywhere",
            ) from error

    def require(self) -> None:
        """A client and a kubeconfig, or one screen."""
        assert self._client is not None

    @cached_property
    def namespace(self) -> str:
        if self.given_namespace:
            return self.given_namespace
        self.require()
        from kubernetes import config

        contexts, current = config.list_kube_config_contexts(_kubeconfig())
        chosen = next((item for item in contexts if item["name"] == self.context), current)
        return str(chosen["context"].get("namespace") or "default")

    @cached_property
    def _objects(self) -> Any:
        from kubernetes import client

        return client.CustomObjectsApi(self._client)

    @cached_property
    def _core(self) -> Any:
        from kubernetes import client

        return client.CoreV1Api(self._client)

    @cached_property
    def _networking(self) -> Any:
        from kubernetes import client

        return client.NetworkingV1Api(self._client)

    # --- Create and delete

    def create(self, job: KubernetesJob) -> None:
        """The job first: what it needs belongs to it, and goes with it.

        The secret comes last. Pods do not start without it, so by then only they can reach each other.
        """
        *needed, main = build_objects(job)
        secret = build_secret(job, create_secret())
        needed += [secret] if secret is not None else []
        group, version, plural = _KINDS[job.api]
        with _asking(f"create {main['kind']} {job.name} in {self.namespace}", job.api):
            created = self._objects.create_namespaced_custom_object(
                group, version, self.namespace, plural, main, _request_timeout=_TIMEOUT_S
            )
        owner = {name: main[name] for name in ("apiVersion", "kind")}
        owner |= {"name": job.name, "uid": created["metadata"]["uid"]}
        try:
            for item in needed:
                item["metadata"]["ownerReferences"] = [owner]
                make = {
                    "Service": self._core.create_namespaced_service,
                    "ConfigMap": self._core.create_namespaced_config_map,
                    "Secret": self._core.create_namespaced_secret,
                    "ServiceAccount": self._core.create_namespaced_service_account,
                    "NetworkPolicy": self._networking.create_namespaced_network_policy,
                }[item["kind"]]
                with _asking(f"create {item['kind']} {item['metadata']['name']} in {self.namespace}", job.api):
                    make(self.namespace, item, _request_timeout=_TIMEOUT_S)
        except PacelineError:
            self.delete(job.name, job.api)  # pods without it would wait for ever
            raise

    def delete(self, name: str, api: str) -> None:
        """Its pods get SIGTERM and their grace to save in."""
        group, version, plural = _KINDS[api]
        with _asking(f"delete {name} in {self.namespace}", api):
            self._objects.delete_namespaced_custom_object(
                group,
                version,
                self.namespace,
                plural,
                name,
                propagation_policy="Foreground",
                _request_timeout=_TIMEOUT_S,
            )

    # --- Look

    def read_state(self, name: str, api: str) -> JobState:
        """In the words of the house; an empty state: the cluster does not know the job, or no longer."""
        group, version, plural = _KINDS[api]
        with _asking(f"read {name} in {self.namespace}", api):
            found = self._objects.list_namespaced_custom_object(
                group,
                version,
                self.namespace,
                plural,
                field_selector=f"metadata.name={name}",
                _request_timeout=_TIMEOUT_S,
            )["items"]
        if not found:
            return JobState(name)
        return _state_of(name, found[0], self._pods(name))

    def read_log(self, name: str, api: str, index: int, *, last_lines: int | None, follow: bool) -> Iterator[bytes]:
        """What a pod has printed; empty while it has not begun."""
        pods = [pod for pod in self._pods(name) if pod["index"] == index]
        if not pods:
            raise UserError(f"there is no pod {index} of this job", where=f"{self.namespace}/{name}")
        if pods[0]["phase"] == "Pending":
            raise UserError("there is no log yet", where=pods[0]["name"], got=pods[0]["waits_for"] or "pending")
        with _asking(f"read the log of {pods[0]['name']}", api):
            answer = self._core.read_namespaced_pod_log(
                pods[0]["name"],
                self.namespace,
                container=CONTAINER[api],
                follow=follow,
                _preload_content=False,
                _request_timeout=(_TIMEOUT_S[0], None if follow else _TIMEOUT_S[1]),
                **({} if last_lines is None else {"tail_lines": last_lines}),
            )
            yield from answer.stream(1 << 16)

    def count_pods(self, name: str) -> int:
        return len({pod["index"] for pod in self._pods(name)})

    def _pods(self, name: str) -> list[dict[str, Any]]:
        """The newest pod of each index, in order."""
        with _asking(f"list the pods of {name} in {self.namespace}", "job"):
            answer = self._core.list_namespaced_pod(
                self.namespace,
                label_selector=f"{NAME_LABEL}={name}",
                _preload_content=False,
                _request_timeout=_TIMEOUT_S,
            )
        pods = [_summary(pod) for pod in json.loads(answer.data)["items"]]
        newest = {pod["index"]: pod for pod in sorted(pods, key=lambda pod: str(pod["created"]))}
        return [newest[index] for index in sorted(newest)]


def _kubeconfig() -> str | None:
    """None: ~/.kube/config. The client itself would only look at what was set when it was imported."""
    return os.environ.get("KUBECONFIG") or None


def require_client() -> None:
    if importlib.util.find_spec("kubernetes") is None:
        raise UserError(
            "the Kubernetes client is not installed",
            hint="pip install 'paceline[kubernetes]'; --dry-run | kubectl apply -f - needs none",
        )


def cluster_of(record: JobRecord) -> Cluster:
    return Cluster(record.cluster, record.namespace)


def read_kubernetes_state(record: JobRecord) -> JobState:
    return cluster_of(record).read_state(record.job_id, record.api)


def read_last_line(record: JobRecord) -> str:
    """The last thing node 0 said; empty where it cannot be read."""
    try:
        text = b"".join(cluster_of(record).read_log(record.job_id, record.api, 0, last_lines=3, follow=False))
    except PacelineError:
        return ""
    lines = [line.strip() for line in text.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


# --- What the cluster says, in our words ------------------------------------------------------------------------------


def _summary(pod: dict[str, Any]) -> dict[str, Any]:
    metadata, status = pod["metadata"], pod.get("status", {})
    containers = status.get("containerStatuses") or []
    waiting = [item["state"]["waiting"] for item in containers if item.get("state", {}).get("waiting")]
    ended = [item["state"]["terminated"] for item in containers if item.get("state", {}).get("terminated")]
    unscheduled = [c for c in status.get("conditions") or [] if c["type"] == "PodScheduled" and c["status"] == "False"]
    reasons = [f"{item.get('reason', '')}: {item.get('message', '')}".rstrip(": ") for item in waiting + unscheduled]
    return {
        "name": metadata["name"],
        "index": int(metadata.get("annotations", {}).get(INDEX, 0)),
        "created": metadata.get("creationTimestamp") or "",
        "phase": status.get("phase", "Pending"),
        "node": pod.get("spec", {}).get("nodeName") or "",
        "started": status.get("startTime"),
        "waits_for": next((reason for reason in reasons if reason), ""),
        "exit_code": next((item.get("exitCode") for item in ended), None),
    }


def _state_of(name: str, found: dict[str, Any], pods: list[dict[str, Any]]) -> JobState:
    status = found.get("status") or {}
    held = {item["type"]: item for item in status.get("conditions") or [] if item.get("status") == "True"}
    nodes = ",".join(dict.fromkeys(pod["node"] for pod in pods if pod["node"]))
    restarts = int(status.get("restarts") or status.get("failed") or 0)
    codes = [str(pod["exit_code"]) for pod in pods if pod["exit_code"]]
    if "Complete" in held or "Completed" in held:
        return JobState(name, "COMPLETED", nodes=nodes, restarts=restarts)
    if "Failed" in held:
        why = f"{held['Failed'].get('reason', '')}: {held['Failed'].get('message', '')}".strip(": ")
        return JobState(name, "FAILED", why, nodes, restarts=restarts, exit_code=codes[0] if codes else "")
    if found["metadata"].get("deletionTimestamp"):
        return JobState(name, "COMPLETING", "it is being deleted", nodes)
    if "Suspended" in held or found.get("spec", {}).get("suspend"):
        queue = found["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name", "")
        return JobState(name, "PENDING", f"in queue {queue}" if queue else "suspended", restarts=restarts)
    running = [pod for pod in pods if pod["phase"] == "Running"]
    done = [pod for pod in pods if pod["phase"] == "Succeeded"]
    if pods and len(running) + len(done) == len(pods):
        return JobState(name, "RUNNING", nodes=nodes, running_for=_age(running or done), restarts=restarts)
    waiting = next((pod["waits_for"] for pod in pods if pod["waits_for"]), "")
    what = f"{len(running)} of {len(pods)} pods run" if pods else "no pod yet"
    return JobState(name, "PENDING", f"{what}; {waiting}".rstrip("; "), nodes, restarts=restarts)


def _age(pods: list[dict[str, Any]]) -> str:
    starts = [datetime.fromisoformat(pod["started"]) for pod in pods if pod["started"]]
    if not starts:
        return ""
    seconds = int((datetime.now(UTC) - max(starts)).total_seconds())
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


@contextmanager
def _asking(what: str, api: str) -> Iterator[None]:
    """Every refusal of the cluster as one screen."""
    require_client()
    from kubernetes.client import ApiException, rest

    try:
        yield
    except ApiException as error:
        raise _refusal(what, api, error) from error
    except (rest.urllib3.exceptions.HTTPError, OSError) as error:
        reason = str(getattr(error, "reason", None) or error)
        raise ClusterUnavailable(
            "the cluster does not answer", where=what, got=reason[:300], hint="kubectl cluster-info; kubectl get nodes"
        ) from error


def _refusal(what: str, api: str, error: Any) -> PacelineError:
    try:
        message = str(json.loads(error.body)["message"])
    except (ValueError, KeyError, TypeError):
        message = str(error.body or error.reason or "").strip()
    verb = what.partition(" ")[0]
    if error.status == 409 and verb == "create":
        return UserError("there is such an object already", where=what, got=message, hint="another --job-name")
    if error.status == 404 and "namespaces" in message:
        return UserError("there is no such namespace", where=what, got=message, hint="--namespace NAME")
    if error.status == 404 and verb == "create" and api in _OPERATORS:
        return UserError(
            f"the cluster knows no {_OPERATORS[api]}", where=what, got=message, hint="--api job needs none"
        )
    if error.status in (401, 403):
        return UserError("the cluster does not let you", where=what, got=message, hint="kubectl auth can-i create jobs")
    if error.status in (400, 422):
        return UserError("the cluster refuses the job", where=what, got=message)
    return ClusterUnavailable(f"the cluster answered {error.status}", where=what, got=message[:300])
