"""The official Kubernetes client, reduced to what a job needs: create, read, stream logs, delete.

Jobs, JobSets and TrainJobs use one generic interface, so all three are dictionaries here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from paceline.errors import PacelineError, UserError
from paceline.integrations.kubernetes.job import REPLICATED_JOB, KubernetesJob
from paceline.integrations.kubernetes.manifest import build_objects
from paceline.integrations.kubernetes.state import PodView, read_job_state, read_pods, sort_events
from paceline.integrations.kubernetes.template import CONTAINER, NAME_LABEL, build_secret
from paceline.integrations.slurm.client import JobState
from paceline.launch.job_record import JobRecord
from paceline.runtime.secret import create_secret
from paceline.settings.extras import how_to_install

_TIMEOUT_S = (5, 20)  # to connect, and between two reads
_KINDS = {  # group, version, plural
    "job": ("batch", "v1", "jobs"),
    "jobset": ("jobset.x-k8s.io", "v1alpha2", "jobsets"),
    "trainjob": ("trainer.kubeflow.org", "v1alpha1", "trainjobs"),
}
_QUOTA = re.compile(r"exceeded quota|failed quota|violates PodSecurity|LimitRange|maximum .* usage per")
_OPERATORS = {"jobset": "JobSets", "trainjob": "TrainJobs: Kubeflow Trainer v2 is not installed"}


class ClusterUnavailable(PacelineError):
    """The cluster did not answer, or refused access."""


@dataclass(frozen=True)
class Cluster:
    """A namespace of a cluster, selected by a context of the kubeconfig (empty: the current one)."""

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
        """Raise UserError without a client or a kubeconfig."""
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
        """Create the job first: it owns the other objects, so they are deleted with it.

        The secret comes last. Pods do not start without it. By then the network policy protects them.
        """
        *needed, main = build_objects(job)
        secret = build_secret(job, create_secret())
        needed += [secret] if secret is not None else []
        group, version, plural = _KINDS[job.api]
        with api_errors(f"create {main['kind']} {job.name} in {self.namespace}", job.api):
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
                with api_errors(f"create {item['kind']} {item['metadata']['name']} in {self.namespace}", job.api):
                    make(self.namespace, item, _request_timeout=_TIMEOUT_S)
        except PacelineError:
            with suppress(PacelineError):  # the first error is the cause
                self.delete(job.name, job.api)  # pods without the object would wait forever
            raise

    def delete(self, name: str, api: str) -> None:
        """The pods get SIGTERM and a grace period to save."""
        group, version, plural = _KINDS[api]
        with api_errors(f"delete {name} in {self.namespace}", api):
            self._objects.delete_namespaced_custom_object(
                group,
                version,
                self.namespace,
                plural,
                name,
                propagation_policy="Foreground",
                _request_timeout=_TIMEOUT_S,
            )

    # --- Read

    def read_state(self, name: str, api: str) -> JobState:
        """The state of a job; empty if the cluster does not know the job, or no longer."""
        group, version, plural = _KINDS[api]
        with api_errors(f"read {name} in {self.namespace}", api):
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
        return read_job_state(name, found[0], self.read_pods(name), self._read_events(name))

    def _read_events(self, name: str) -> list[dict[str, Any]]:
        """Events about pods that cannot be created. Empty also without permission to read events."""
        try:
            with api_errors(f"list events in {self.namespace}", "job"):
                answer = self._core.list_namespaced_event(
                    self.namespace,
                    field_selector="type=Warning",
                    _preload_content=False,
                    _request_timeout=_TIMEOUT_S,
                )
        except UserError:
            return []
        own = (name, f"{name}-{REPLICATED_JOB}-0")  # the name of a JobSet's Job
        items = json.loads(answer.data)["items"]
        return sort_events(item for item in items if (item.get("involvedObject") or {}).get("name") in own)

    def read_pods(self, name: str) -> list[PodView]:
        """All pods of a job that the cluster still knows, oldest first."""
        with api_errors(f"list the pods of {name} in {self.namespace}", "job"):
            answer = self._core.list_namespaced_pod(
                self.namespace,
                label_selector=f"{NAME_LABEL}={name}",
                _preload_content=False,
                _request_timeout=_TIMEOUT_S,
            )
        return read_pods(json.loads(answer.data)["items"])

    def stream_log(self, pod: str, api: str, *, read_timeout_s: int = _TIMEOUT_S[1], **options: Any) -> Iterator[bytes]:
        """The log of a pod. Raises urllib3's errors if the stream breaks."""
        with api_errors(f"read the log of {pod}", api):
            answer = self._core.read_namespaced_pod_log(
                pod,
                self.namespace,
                container=CONTAINER[api],
                _preload_content=False,
                _request_timeout=(_TIMEOUT_S[0], read_timeout_s),  # numbers: the client refuses None
                **options,
            )
        try:
            yield from answer.stream(1 << 16)
        finally:
            answer.close()


def _kubeconfig() -> str | None:
    """None: ~/.kube/config. The client itself reads the variable only at import."""
    return os.environ.get("KUBECONFIG") or None


def broken_stream_errors() -> tuple[type[Exception], ...]:
    """The exceptions of a stream that breaks."""
    require_client()
    from kubernetes.client import rest

    return (rest.urllib3.exceptions.HTTPError, OSError)


def require_client() -> None:
    if importlib.util.find_spec("kubernetes") is None:
        raise UserError(
            "the Kubernetes client is not installed",
            hint=f"{how_to_install('kubernetes')}; --dry-run | kubectl apply -f - needs none",
        )


def cluster_of(record: JobRecord) -> Cluster:
    return Cluster(record.cluster, record.namespace)


def read_kubernetes_state(record: JobRecord) -> JobState:
    return cluster_of(record).read_state(record.job_id, record.api)


@contextmanager
def api_errors(what: str, api: str) -> Iterator[None]:
    """Convert API errors to Paceline errors."""
    require_client()
    from kubernetes.client import ApiException

    try:
        yield
    except ApiException as error:
        raise _refusal(what, api, error) from error
    except broken_stream_errors() as error:
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
        return UserError("an object with this name exists already", where=what, got=message, hint="another --job-name")
    if error.status == 404 and "namespaces" in message:
        return UserError("there is no such namespace", where=what, got=message, hint="--namespace NAME")
    if error.status == 404 and verb == "create" and api in _OPERATORS:
        return UserError(f"the cluster has no {_OPERATORS[api]}", where=what, got=message, hint="--api job needs none")
    if "admission webhook" in message or "admission policy" in message:
        # An admission webhook may answer 403 or 400. Its message is about the job, not about permissions.
        hint = "--runtime NAME; kubectl get clustertrainingruntimes lists them" if api == "trainjob" else None
        return UserError("the cluster refuses the job", where=what, got=message, hint=hint)
    if error.status == 403 and _QUOTA.search(message):
        return UserError("the job does not fit into the namespace", where=what, got=message, hint="kubectl get quota")
    if error.status in (401, 403):
        return UserError("the cluster does not let you", where=what, got=message, hint="kubectl auth can-i create jobs")
    if error.status in (400, 422):
        return UserError("the cluster refuses the job", where=what, got=message)
    return ClusterUnavailable(f"the cluster answered {error.status}", where=what, got=message[:300])
