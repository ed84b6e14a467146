"""Access to and from the pods of a job: NetworkPolicy, Secret, ServiceAccount. Also labels and names."""

from __future__ import annotations

from typing import Any

from paceline.integrations.kubernetes.job import KubernetesJob
from paceline.runtime.secret import RUN_SECRET

NAME_LABEL = "app.kubernetes.io/instance"
Object = dict[str, Any]


def metadata(job: KubernetesJob, name: str = "", *, queued: bool = False) -> Object:
    metadata: Object = {"name": name or job.name}
    if job.namespace:
        metadata["namespace"] = job.namespace
    metadata["labels"] = labels(job)
    if queued and job.queue:
        metadata["labels"]["kueue.x-k8s.io/queue-name"] = job.queue
    return metadata


def labels(job: KubernetesJob) -> Object:
    return {"app.kubernetes.io/name": "paceline", NAME_LABEL: job.name, "app.kubernetes.io/managed-by": "paceline"}


def secret_name(job: KubernetesJob) -> str:
    return f"{job.name}-secret"


def build_secret(job: KubernetesJob, value: str) -> Object | None:
    """The secret with which pods authenticate to each other. It is not in the manifest, which others may read."""
    if job.nodes == 1:
        return None
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(job, secret_name(job)),
        "immutable": True,
        "type": "Opaque",
        "stringData": {RUN_SECRET: value},
    }


def about_secret(job: KubernetesJob, namespace: str) -> list[str]:
    if job.nodes == 1:
        return []
    name = secret_name(job)
    return [
        "The pods authenticate with a secret. paceline submit creates it; with kubectl apply, create it yourself:",
        f"  openssl rand -hex 32 | kubectl create{namespace} secret generic {name} --from-file={RUN_SECRET}=/dev/stdin",
        f"  kubectl label{namespace} secret {name} {NAME_LABEL}={job.name}",
    ]


def network_policy(job: KubernetesJob) -> Object:
    """Only pods of this job reach its pods: torch's store, gloo and NCCL do not authenticate connections."""
    pods = {"podSelector": {"matchLabels": {NAME_LABEL: job.name}}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": metadata(job),
        "spec": {**pods, "policyTypes": ["Ingress"], "ingress": [{"from": [pods]}] if job.nodes > 1 else []},
    }


def needs_service_account(job: KubernetesJob) -> bool:
    return job.api == "trainjob" and not job.service_account


def service_account(job: KubernetesJob) -> Object:
    """For pods of a TrainJob: its pod patch cannot set `automountServiceAccountToken`, but a ServiceAccount can."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": metadata(job),
        "automountServiceAccountToken": False,
    }


def keep_token_out(job: KubernetesJob, pod: Object, container: Object) -> None:
    """For a pod of a TrainJob: use an account without a token, and mount an empty folder over the token's path.

    The mount also works if a runtime sets another account or requests its token.
    """
    if needs_service_account(job):
        pod["serviceAccountName"] = job.name
    path = "/var/run/secrets/kubernetes.io/serviceaccount"
    container["volumeMounts"].append({"name": "no-token", "mountPath": path, "readOnly": True})
    pod["volumes"].append({"name": "no-token", "emptyDir": {}})
