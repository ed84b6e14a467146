"""The pod of a job: one template for Jobs, JobSets and TrainJobs."""

from __future__ import annotations

from typing import Any

from paceline.integrations.kubernetes.job import REPLICATED_JOB, KubernetesJob
from paceline.integrations.kubernetes.pod import LEADER, NODE, NODES
from paceline.integrations.kubernetes.values import FILES_PATH, Volume
from paceline.launch.job_record import SECRET_PREFIX
from paceline.runtime.detect import MACHINE
from paceline.runtime.secret import RUN_SECRET
from paceline.settings.values import START_TIMEOUT

NAME_LABEL = "app.kubernetes.io/instance"
INDEX = "batch.kubernetes.io/job-completion-index"
CONTAINER = {"job": "train", "jobset": "train", "trainjob": "node"}
_NODE_TAINTS = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")

Object = dict[str, Any]


# Access to and from the pods of a job: NetworkPolicy, Secret, ServiceAccount. Also labels and names.


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


def leader_host(job: KubernetesJob) -> str:
    """The host name of node 0's pod within the namespace."""
    pod = f"{job.name}-0" if job.api == "job" else f"{job.name}-{REPLICATED_JOB}-0-0"
    return f"{pod}.{job.name}"


def files_name(job: KubernetesJob) -> str:
    return f"{job.name}-files"


def pod_metadata(job: KubernetesJob) -> Object:
    metadata: Object = {"labels": {**labels(job), **dict(job.labels)}}
    if job.annotations:
        metadata["annotations"] = dict(job.annotations)
    return metadata


def build_pod(job: KubernetesJob) -> Object:
    pod: Object = {}
    if job.nodes > 1 and job.api == "job":
        pod["subdomain"] = job.name  # the headless Service: pods are NAME-INDEX.NAME
    pod |= {
        "restartPolicy": "Never",  # the Job's failure policy handles failed pods
        "terminationGracePeriodSeconds": job.grace_s,
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
    }
    if job.service_account:
        pod["serviceAccountName"] = job.service_account
    if job.priority_class:
        pod["priorityClassName"] = job.priority_class
    if job.image_pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in job.image_pull_secrets]
    if job.node_selector:
        pod["nodeSelector"] = dict(job.node_selector)
    if job.scheduler:
        pod["schedulerName"] = job.scheduler
    if job.tolerations or job.node_timeout_s:
        pod["tolerations"] = _tolerations(job)
    if job.nodes > 1:
        pod["affinity"] = _one_to_a_node(job)
    pod["securityContext"] = {
        "runAsNonRoot": True,
        "runAsUser": job.user.uid,
        "runAsGroup": job.user.gid,
        "fsGroup": job.user.gid,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    pod["containers"] = [_container(job)]
    pod["volumes"] = _volumes(job)
    return pod


def _tolerations(job: KubernetesJob) -> list[Object]:
    rows = []
    for item in job.tolerations:
        row: Object = {"key": item.key, "operator": "Equal" if item.value else "Exists"}
        row |= {"value": item.value} if item.value else {}
        row |= {"effect": item.effect} if item.effect else {}
        rows.append(row)
    if job.node_timeout_s:  # without these two, the cluster adds them with 300 s
        limited = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": job.node_timeout_s}
        rows += [{"key": key, **limited} for key in _NODE_TAINTS]
    return rows


def _one_to_a_node(job: KubernetesJob) -> Object:
    """Spread pods: two pods on one node would share its network, and both would be lost with it."""
    term = {"labelSelector": {"matchLabels": {NAME_LABEL: job.name}}, "topologyKey": "kubernetes.io/hostname"}
    return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}


def _container(job: KubernetesJob) -> Object:
    module = "paceline" if job.nodes == 1 else "paceline.integrations.kubernetes.pod"
    resources: Object = {"cpu": str(job.cpus), "memory": job.memory}
    if job.has_gpus:
        resources[job.gpu_resource] = str(job.ranks_per_node)
    if job.ephemeral_storage:
        resources["ephemeral-storage"] = job.ephemeral_storage
    resources |= dict(job.resources)
    container: Object = {
        "name": CONTAINER[job.api],
        "image": job.image,
        "command": ["python", "-P", "-m", module],  # -P: no modules from the working folder
        "args": [_literal(word) for word in ("train", *job.train)],
        "workingDir": "/tmp",
        "env": _environment(job),
    }
    if job.secrets:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in job.secrets]
    if job.nodes > 1:
        container["ports"] = [{"name": "leader", "containerPort": job.port, "protocol": "TCP"}]
    container |= {
        "resources": {"requests": resources, "limits": dict(resources)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]} | ({"add": list(job.capabilities)} if job.capabilities else {}),
        },
        "volumeMounts": _mounts(job),
    }
    return container


def _literal(text: str) -> str:
    """Escape `$(NAME)`, which Kubernetes would expand."""
    return text.replace("$(", "$$(")


def _environment(job: KubernetesJob) -> list[Object]:
    rows: list[Object] = [
        {"name": "PYTHONUNBUFFERED", "value": "1"},
        {"name": "HOME", "value": "/tmp"},
        {"name": "USER", "value": "paceline"},  # the image may have no name for the pod's user id
    ]
    rows.append({"name": MACHINE, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}})
    if job.nodes > 1:
        rows += [
            {"name": NODES, "value": str(job.nodes)},
            {"name": NODE, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}},
            {"name": LEADER, "value": f"{leader_host(job)}:{job.port}"},
            {"name": START_TIMEOUT, "value": str(job.start_timeout_s)},
            {"name": RUN_SECRET, "valueFrom": {"secretKeyRef": {"name": secret_name(job), "key": RUN_SECRET}}},
        ]
    return rows + [_variable(name, value) for name, value in job.env]


def _variable(name: str, value: str) -> Object:
    if not value.startswith(SECRET_PREFIX):
        return {"name": name, "value": _literal(value)}
    secret, _, key = value.removeprefix(SECRET_PREFIX).partition("/")
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def _volume_names(job: KubernetesJob) -> list[tuple[str, Volume]]:
    names = {"/runs": "runs", "/data": "data"}
    return [(names.get(volume.path, f"mount-{number}"), volume) for number, volume in enumerate(job.all_volumes)]


def _mounts(job: KubernetesJob) -> list[Object]:
    rows: list[Object] = []
    for name, volume in _volume_names(job):
        rows.append({"name": name, "mountPath": volume.path} | ({"readOnly": True} if volume.is_read_only else {}))
    rows += [{"name": "tmp", "mountPath": "/tmp"}, {"name": "shm", "mountPath": "/dev/shm"}]
    if job.files:
        rows.append({"name": "files", "mountPath": FILES_PATH, "readOnly": True})
    return rows


def _volumes(job: KubernetesJob) -> list[Object]:
    rows: list[Object] = []
    for name, volume in _volume_names(job):
        if volume.is_host_path:
            rows.append({"name": name, "hostPath": {"path": volume.source, "type": "Directory"}})
        else:
            claim: Object = {"claimName": volume.source} | ({"readOnly": True} if volume.is_read_only else {})
            rows.append({"name": name, "persistentVolumeClaim": claim})
    rows += [
        {"name": "tmp", "emptyDir": {"sizeLimit": job.ephemeral_storage} if job.ephemeral_storage else {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": job.shm}},
    ]
    if job.files:
        rows.append({"name": "files", "configMap": {"name": files_name(job)}})
    return rows
