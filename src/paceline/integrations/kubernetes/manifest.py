"""The manifest of a job: readable YAML in a fixed order.

Three kinds of jobs use the same pod: an Indexed Job, which every cluster supports; a JobSet, which restarts all pods
if one fails; a TrainJob of Kubeflow Trainer v2, where a runtime of the cluster sets the rest.
"""

from __future__ import annotations

import shlex
from typing import Any

import paceline
from paceline.errors import EXIT_PREEMPTED
from paceline.integrations.kubernetes.job import REPLICATED_JOB, KubernetesJob
from paceline.integrations.kubernetes.template import (
    CONTAINER,
    NAME_LABEL,
    about_secret,
    build_pod,
    files_name,
    keep_token_out,
    metadata,
    needs_service_account,
    network_policy,
    pod_metadata,
    secret_name,
    service_account,
)
from paceline.launch.job_record import hide_values
from paceline.launch.policy import FINAL_CODES
from paceline.settings.text import check_fields, check_text

MANIFEST = "job.yaml"
_KEEP_FINISHED_S = 7 * 86_400
_OTHER_BREAKS = frozenset("\r\x85\u2028\u2029\ufeff")

Object = dict[str, Any]


def write_manifest(job: KubernetesJob) -> str:
    """All objects of a job as one YAML text."""
    import yaml

    # A newline in a value, or in the comment with the command, could start another document.
    check_fields(job, secret=("env", "command"), exempt=("files",))
    for name, _ in job.files:
        check_text(name, "the name of a file")

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True  # no anchors such as `&id001`

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
            super().increase_indent(flow, False)  # indent lists below their key

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        # Use a literal block, unless YAML would change another kind of line break.
        style = '"' if _OTHER_BREAKS & set(value) else "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    documents = [
        yaml.dump(item, Dumper=Dumper, sort_keys=False, default_flow_style=False, width=1000, allow_unicode=True)
        for item in build_objects(job)
    ]
    return _header(job) + "---\n".join(documents)


def build_objects(job: KubernetesJob) -> list[Object]:
    """The job comes last, so that the objects its pods need exist first."""
    objects: list[Object] = []
    if job.files:
        objects.append(_files(job))
    if job.nodes > 1 and job.api == "job":
        objects.append(_service(job))  # JobSets and TrainJobs create their own
    if needs_service_account(job):
        objects.append(service_account(job))
    objects.append(network_policy(job))
    return [*objects, {"job": _job, "jobset": _jobset, "trainjob": _trainjob}[job.api](job)]


def _about_owner(job: KubernetesJob, namespace: str) -> list[str]:
    """A manifest cannot set owner references, because only the cluster knows the uid of the job."""
    *others, main = build_objects(job)
    names = [f"{item['kind'].lower()}/{item['metadata']['name']}" for item in others]
    names += [f"secret/{secret_name(job)}"] if job.nodes > 1 else []
    owner = f'"apiVersion":"{main["apiVersion"]}","kind":"{main["kind"]}","name":"{job.name}","uid":"\'$uid\'"'
    patch = f'{{"metadata":{{"ownerReferences":[{{{owner}}}]}}}}'
    return [
        "paceline submit makes the job own the other objects, so that they are deleted with it. After kubectl apply:",
        f"  uid=$(kubectl get{namespace} {main['kind'].lower()} {job.name} --output jsonpath={{.metadata.uid}})",
        f"  kubectl patch{namespace} {' '.join(names)} --type merge --patch '{patch}'",
    ]


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
        *_about_owner(job, namespace),
        "Follow and remove it:",
        f"  kubectl logs{namespace} --follow --selector {NAME_LABEL}={job.name} --prefix",
        f"  kubectl delete{namespace} {kinds} --selector {NAME_LABEL}={job.name}",
    ]
    return "".join(f"# {line}\n" for line in lines)


def _about_failures(job: KubernetesJob) -> list[str]:
    if job.api == "trainjob":
        return ["The runtime decides about retries and exit codes."]
    final = ", ".join(map(str, FINAL_CODES))
    whose = "" if job.api == "jobset" else " to each pod"
    return [
        f"Pods that lose their node or end with {EXIT_PREEMPTED} (saved, stop requested) are replaced and not counted;",
        f"{final} (mistake, data, checkpoint, numbers, owner, wrong bits) end the job;",
        f"other failures may happen {job.most_failures} times{whose}.",
    ]


# --- Other objects ----------------------------------------------------------------------------------------------------


def _files(job: KubernetesJob) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(job, files_name(job)),
        "immutable": True,
        "data": dict(job.files),
    }


def _service(job: KubernetesJob) -> Object:
    """A headless Service, which only gives each pod a DNS name."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(job),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {NAME_LABEL: job.name},
            "ports": [{"name": "leader", "port": job.port, "targetPort": job.port, "protocol": "TCP"}],
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
        "spec": {**spec, **_indexed(job, most_failures=job.most_failures)},
    }


def _indexed(job: KubernetesJob, *, most_failures: int) -> Object:
    """One pod per node, all started together, each with its index.

    Failures and back-off are counted per pod. If they were counted together, each of several pods evicted at the same
    time would double the delay of all successors, up to ten minutes.
    """
    spec: Object = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimitPerIndex": most_failures,
        "maxFailedIndexes": 0,
    }
    if job.limit_s:
        spec["activeDeadlineSeconds"] = job.limit_s
    if job.nodes > 1:
        # Node 0 succeeds only if all nodes succeed.
        spec["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}
    spec["podFailurePolicy"] = {"rules": _failure_rules(job)}
    spec["template"] = {"metadata": pod_metadata(job), "spec": build_pod(job)}
    return spec


def _failure_rules(job: KubernetesJob) -> list[Object]:
    """Lost nodes and requested stops are retried and not counted. A user error ends the job. Other failures count."""

    def codes(action: str, *values: int) -> Object:
        which = {"containerName": CONTAINER[job.api], "operator": "In", "values": list(values)}
        return {"action": action, "onExitCodes": which}

    return [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        codes("Ignore", EXIT_PREEMPTED),
        codes("FailJob", *FINAL_CODES),
    ]


def _jobset(job: KubernetesJob) -> Object:
    """A failure that counts ends its Job at once. The JobSet then restarts all pods, except after a user error."""
    mistake = {"name": "mistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    late = {"name": "deadline", "action": "FailJobSet", "onJobFailureReasons": ["DeadlineExceeded"]}
    spec: Object = {"suspend": True} if job.queue else {}
    spec |= {
        "ttlSecondsAfterFinished": _KEEP_FINISHED_S,
        "network": {"enableDNSHostnames": True, "subdomain": job.name, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": job.most_failures, "rules": [mistake, late]},
        "replicatedJobs": [
            {"name": REPLICATED_JOB, "replicas": 1, "template": {"spec": _indexed(job, most_failures=0)}},
        ],
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata(job, queued=True),
        "spec": spec,
    }


def _trainjob(job: KubernetesJob) -> Object:
    """Settings of the pods are a patch of the runtime. The runtime decides about retries and exit codes."""
    pod = build_pod(job)
    train = pod.pop("containers")[0]
    for name in ("restartPolicy", "enableServiceLinks", "automountServiceAccountToken"):
        pod.pop(name, None)
    keep_token_out(job, pod, train)
    pod["containers"] = [{name: train[name] for name in ("name", "securityContext", "volumeMounts")}]
    patch = {
        "name": REPLICATED_JOB,
        "template": {"spec": {"template": {"metadata": pod_metadata(job), "spec": pod}}},
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
