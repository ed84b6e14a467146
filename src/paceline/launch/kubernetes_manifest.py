"""The manifest of a job: what a careful person would write by hand, as YAML in one order, for a reviewer to read.

Three kinds of jobs from one pod: an Indexed Job, which every cluster knows; a JobSet, which starts all pods anew when
one has failed; a TrainJob of Kubeflow Trainer v2, where a runtime that the cluster's owner wrote decides the rest.
"""

from __future__ import annotations

import shlex
from typing import Any

import paceline
from paceline.config.text import check_fields, check_text
from paceline.config.variables import START_TIMEOUT
from paceline.errors import EXIT_PREEMPTED
from paceline.launch.job_record import SECRET_PREFIX, hide_values
from paceline.launch.kubernetes_access import (
    NAME_LABEL,
    about_secret,
    keep_token_out,
    labels,
    metadata,
    needs_service_account,
    network_policy,
    secret_name,
    service_account,
)
from paceline.launch.kubernetes_gang import MEET, NODE, NODES
from paceline.launch.kubernetes_job import FILES_PATH, REPLICATED_JOB, KubernetesJob, Volume
from paceline.launch.policy import FINAL_CODES
from paceline.world.secret import RUN_SECRET

MANIFEST = "job.yaml"
INDEX = "batch.kubernetes.io/job-completion-index"
CONTAINER = {"job": "train", "jobset": "train", "trainjob": "node"}
_KEEP_FINISHED_S = 7 * 86_400
_OTHER_BREAKS = frozenset("\r\x85\u2028\u2029\ufeff")

Object = dict[str, Any]


def write_manifest(job: KubernetesJob) -> str:
    """All objects of a job as one YAML text."""
    import yaml

    # A newline in a text, or in the comment with the command, could begin another document.
    check_fields(job, secret=("env", "command"), exempt=("files",))
    for name, _ in job.files:
        check_text(name, "the name of a file")

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True  # `&id001` is nothing for people to read

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
            super().increase_indent(flow, False)  # lists stand below their key, indented

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        # Line by line, unless YAML would change one of its other line breaks.
        style = '"' if _OTHER_BREAKS & set(value) else "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    documents = [
        yaml.dump(item, Dumper=Dumper, sort_keys=False, default_flow_style=False, width=1000, allow_unicode=True)
        for item in build_objects(job)
    ]
    return _header(job) + "---\n".join(documents)


def build_objects(job: KubernetesJob) -> list[Object]:
    """The job itself comes last: what its pods need is there before them."""
    objects: list[Object] = []
    if job.files:
        objects.append(_files(job))
    if job.nodes > 1 and job.api == "job":
        objects.append(_service(job))  # the others bring their own
    if needs_service_account(job):
        objects.append(service_account(job))
    objects.append(network_policy(job))
    return [*objects, {"job": _job, "jobset": _jobset, "trainjob": _trainjob}[job.api](job)]


def leader_host(job: KubernetesJob) -> str:
    """The name of node 0's pod within the namespace."""
    pod = f"{job.name}-0" if job.api == "job" else f"{job.name}-{REPLICATED_JOB}-0-0"
    return f"{pod}.{job.name}"


def _header(job: KubernetesJob) -> str:
    ranks = f"{job.world_size} rank" + ("s" if job.world_size > 1 else "")
    nodes = f"{job.nodes} node" + ("s" if job.nodes > 1 else "")
    kinds = ",".join([*(item["kind"].lower() for item in build_objects(job)), *(["secret"] if job.nodes > 1 else [])])
    namespace = f" --namespace {job.namespace}" if job.namespace else ""
    lines = [
        f"{job.name}: {ranks} on {nodes}. Written by paceline {paceline.__version__}:",
        f"  {shlex.join(hide_values(job.command))}",
        *_about_failures(job),
        *about_secret(job, namespace),
        "Follow and remove it:",
        f"  kubectl logs{namespace} --follow --selector {NAME_LABEL}={job.name} --prefix",
        f"  kubectl delete{namespace} {kinds} --selector {NAME_LABEL}={job.name}",
    ]
    return "".join(f"# {line}\n" for line in lines)


def _about_failures(job: KubernetesJob) -> list[str]:
    if job.api == "trainjob":
        return ["Retries and what exit codes mean to them are up to the runtime."]
    final = ", ".join(map(str, FINAL_CODES))
    return [
        f"Pods that lose their node or end with {EXIT_PREEMPTED} (saved, asked to stop) are replaced and not counted;",
        f"{final} (mistake, data, checkpoint, numbers, owner) end the job; others are tried {job.retries} times more.",
    ]


# --- Beside the job ---------------------------------------------------------------------------------------------------


def _files_name(job: KubernetesJob) -> str:
    return f"{job.name}-files"


def _files(job: KubernetesJob) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(job, _files_name(job)),
        "immutable": True,
        "data": dict(job.files),
    }


def _service(job: KubernetesJob) -> Object:
    """Headless: it gives each pod a name of its own, from the start, and nothing else."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(job),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {NAME_LABEL: job.name},
            "ports": [{"name": "meet", "port": job.port, "targetPort": job.port, "protocol": "TCP"}],
        },
    }


# --- The job ----------------------------------------------------------------------------------------------------------


def _job(job: KubernetesJob) -> Object:
    spec: Object = {"suspend": True} if job.queue else {}
    spec["ttlSecondsAfterFinished"] = _KEEP_FINISHED_S
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(job, queued=True),
        "spec": {**spec, **_indexed(job, backoff_limit=job.retries)},
    }


def _indexed(job: KubernetesJob, *, backoff_limit: int) -> Object:
    """One pod for each node, all at once, each knowing its number."""
    spec: Object = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": backoff_limit,
    }
    if job.limit_s:
        spec["activeDeadlineSeconds"] = job.limit_s
    if job.nodes > 1:
        # Node 0 ends well only when all have.
        spec["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
    spec["podFailurePolicy"] = {"rules": _failure_rules(job)}
    spec["template"] = {"metadata": {"labels": labels(job)}, "spec": _pod(job)}
    return spec


def _failure_rules(job: KubernetesJob) -> list[Object]:
    """Lost nodes and polite stops are tried again and not counted; a mistake ends the job; all else counts."""

    def codes(action: str, *values: int) -> Object:
        which = {"containerName": CONTAINER[job.api], "operator": "In", "values": list(values)}
        return {"action": action, "onExitCodes": which}

    return [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        codes("Ignore", EXIT_PREEMPTED),
        codes("FailJob", *FINAL_CODES),
    ]


def _jobset(job: KubernetesJob) -> Object:
    """A failure that counts ends its Job at once; the JobSet then starts all pods anew, unless it was a mistake."""
    mistake = {"name": "mistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    late = {"name": "deadline", "action": "FailJobSet", "onJobFailureReasons": ["DeadlineExceeded"]}
    spec: Object = {"suspend": True} if job.queue else {}
    spec |= {
        "ttlSecondsAfterFinished": _KEEP_FINISHED_S,
        "network": {"enableDNSHostnames": True, "subdomain": job.name, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": job.retries, "rules": [mistake, late]},
        "replicatedJobs": [
            {"name": REPLICATED_JOB, "replicas": 1, "template": {"spec": _indexed(job, backoff_limit=0)}},
        ],
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata(job, queued=True),
        "spec": spec,
    }


def _trainjob(job: KubernetesJob) -> Object:
    """What it may say of its pods stands in a patch of its runtime; retries and exit codes are the runtime's own."""
    pod = _pod(job)
    train = pod.pop("containers")[0]
    for name in ("restartPolicy", "enableServiceLinks", "automountServiceAccountToken"):
        pod.pop(name, None)
    keep_token_out(job, pod, train)
    pod["containers"] = [{name: train[name] for name in ("name", "securityContext", "volumeMounts")}]
    patch = {
        "name": REPLICATED_JOB,
        "template": {"spec": {"template": {"metadata": {"labels": labels(job)}, "spec": pod}}},
    }
    spec: Object = {"suspend": True} if job.queue else {}
    if job.limit_s:
        spec["activeDeadlineSeconds"] = job.limit_s
    spec |= {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": job.runtime},
        "trainer": {
            "image": job.image,
            "command": train["command"],
            "args": train["args"],
            "numNodes": job.nodes,
            "numProcPerNode": job.ranks_per_node,
            "resourcesPerNode": train["resources"],
            "env": train["env"],
        },
        "runtimePatches": [
            {
                "manager": "paceline/submit",
                "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [patch]}}},
            }
        ],
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata(job, queued=True),
        "spec": spec,
    }


# --- The pod ----------------------------------------------------------------------------------------------------------


def _pod(job: KubernetesJob) -> Object:
    pod: Object = {}
    if job.nodes > 1 and job.api == "job":
        pod["subdomain"] = job.name  # of the headless Service: pods are NAME-INDEX.NAME
    pod |= {
        "restartPolicy": "Never",  # a pod that has failed is for the Job's policy to judge
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
    if job.tolerations:
        pod["tolerations"] = _tolerations(job)
    pod["securityContext"] = {
        "runAsNonRoot": True,
        "runAsUser": job.user,
        "runAsGroup": job.group,
        "fsGroup": job.group,
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
    return rows


def _container(job: KubernetesJob) -> Object:
    module = "paceline" if job.nodes == 1 else "paceline.launch.kubernetes_pod"
    resources: Object = {"cpu": str(job.cpus), "memory": job.memory}
    if job.has_gpus:
        resources[job.gpu_resource] = str(job.ranks_per_node)
    container: Object = {
        "name": CONTAINER[job.api],
        "image": job.image,
        "command": ["python", "-m", module],
        "args": [_literal(word) for word in ("train", *job.train)],
        "workingDir": "/tmp",
        "env": _environment(job),
    }
    if job.secrets:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in job.secrets]
    if job.nodes > 1:
        container["ports"] = [{"name": "meet", "containerPort": job.port, "protocol": "TCP"}]
    container |= {
        "resources": {"requests": resources, "limits": dict(resources)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": _mounts(job),
    }
    return container


def _literal(text: str) -> str:
    """Kubernetes would put a variable's value in the place of `$(NAME)`."""
    return text.replace("$(", "$$(")


def _environment(job: KubernetesJob) -> list[Object]:
    rows: list[Object] = [
        {"name": "PYTHONUNBUFFERED", "value": "1"},
        {"name": "HOME", "value": "/tmp"},
        {"name": "USER", "value": "paceline"},  # the image may not know the number the pod runs as
    ]
    if job.nodes > 1:
        rows += [
            {"name": NODES, "value": str(job.nodes)},
            {"name": NODE, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}},
            {"name": MEET, "value": f"{leader_host(job)}:{job.port}"},
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
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": job.shm}},
    ]
    if job.files:
        rows.append({"name": "files", "configMap": {"name": _files_name(job)}})
    return rows
