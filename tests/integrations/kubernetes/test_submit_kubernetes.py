"""Manifests have the right content, mistakes are found quickly, and pods end and restart together."""

from __future__ import annotations

import json
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from harness.cli import environment
from harness.fake_slurm import clean_home
from paceline.cli.main import main
from paceline.errors import UserError
from paceline.integrations.kubernetes.job import Api, KubernetesJob, longest_name
from paceline.integrations.kubernetes.pod import read_member
from paceline.integrations.kubernetes.values import as_name
from paceline.launch.gang_messages import Ended, Hello, Outcome, Start, Upload, decide, decode, encode
from paceline.runtime.peers import MalformedMessage, Peer, connect
from paceline.runtime.secret import RUN_SECRET, NotProved, create_secret
from paceline.settings.declare import fields_of
from paceline.settings.extras import how_to_install
from paceline.settings.schema import find_field

USER, DATA, PREEMPTED, INTERNAL = 2, 3, 75, 70
MOST_LINES = 12
IMAGE = "registry.example.com/team/paceline:0.1.0"
JOB = ["shapes-cnn", "--image", IMAGE, "--runs", "paceline-runs", "--nodes", "2", "--processes-per-node", "2"]
BARE = JOB[:5]  # without nodes and ranks


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    clean_home(tmp_path, monkeypatch)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "no-kubeconfig"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def submit(*arguments: str) -> int:
    return main(["submit", "kubernetes", *arguments])


def manifest(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    """The objects that --dry-run prints."""
    assert submit(*arguments, "--dry-run") == 0, capsys.readouterr().err
    return list(yaml.safe_load_all(capsys.readouterr().out))


def pod_of(item: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = item["spec"]["template"]["spec"]
    return pod


# --- Wrong input ------------------------------------------------------------------------------------------------------

# The arguments after `paceline submit kubernetes`, and the expected text.
WRONG: dict[str, tuple[list[str], list[str]]] = {
    "no such recipe": (["shape-cnn", *JOB[1:]], ["no recipe 'shape-cnn'", "shapes-cnn"]),
    "misspelt flag of train": ([*JOB, "--epoch", "2"], ["unknown flag '--epoch'", "--epochs"]),
    "misspelt flag of submit": ([*JOB, "--namspace", "x"], ["unknown flag '--namspace'", "--namespace"]),
    "flag without value": ([*JOB, "--queue"], ["--queue needs a value", "Kueue"]),
    "value out of range": ([*JOB, "--epochs", "0"], ["epochs is out of range"]),
    "no image": (["shapes-cnn", "--runs", "r", "--gpus", "2"], ["--image is missing", "docker build"]),
    "image with capitals": ([*JOB, "--image", "Team/Paceline:1"], ["image: 'Team/Paceline:1'", "team/paceline:1"]),
    "image with spaces": ([*JOB, "--image", "a b:1"], ["image: 'a b:1'", "without spaces"]),
    "image without tag": ([*JOB, "--image", "team/paceline"], ["another image later", "team/paceline:0.1.0"]),
    "image latest": ([*JOB, "--image", "team/paceline:latest"], ["another image later", "digest"]),
    "no runs": (["shapes-cnn", "--image", IMAGE, "--gpus", "2"], ["--runs is missing", "kubectl get pvc"]),
    "runs on a relative path": ([*JOB, "--runs", "my/runs"], ["runs: 'my/runs'", "PersistentVolumeClaim"]),
    "no ranks": ([*BARE, "--nodes", "2"], ["number of ranks per pod is missing", "--gpus-per-node N"]),
    "ranks twice": ([*JOB, "--gpus-per-node", "2"], ["ranks are given twice", "--processes-per-node 2"]),
    "--processes": ([*JOB, "--processes", "4"], ["given per node", "--processes-per-node 4"]),
    "no nodes": ([*JOB, "--nodes", "0"], ["nodes is out of range", "from 1"]),
    "nodes in words": ([*JOB, "--nodes", "two"], ["nodes: 'two'", "a whole number"]),
    "GPUs not divisible": ([*BARE, "--nodes", "3", "--gpus", "8"], ["8 GPUs", "3 nodes", "--gpus 6 or 9"]),
    "batch not divisible": (
        [*BARE, "--nodes", "3", "--processes-per-node", "2"],
        ["not divisible by 6", "nodes x ranks per node of"],
    ),
    "lanes not divisible": ([*JOB, "--lanes", "2"], ["2 lanes cannot be shared equally by 4 ranks"]),
    "device against ranks": ([*JOB, "--device", "cuda"], ["contradict each other", "--gpus-per-node 2"]),
    "single on several": ([*JOB, "--strategy", "single"], ["strategy single runs on one process"]),
    "unknown api": ([*JOB, "--api", "jobsets"], ["api: 'jobsets'", "job, jobset, trainjob", "--api jobset"]),
    "api of a predecessor": ([*JOB, "--api", "pytorchjob"], ["api: 'pytorchjob'", "job, jobset, trainjob"]),
    "memory in gigabytes": ([*JOB, "--memory", "64GB"], ["memory: '64GB'", "--memory 64Gi"]),
    "memory in small letters": ([*JOB, "--memory", "64gi"], ["memory: '64gi'", "--memory 64Gi"]),
    "memory without unit": ([*JOB, "--memory", "64"], ["memory: '64'", "Gi"]),
    "shm above memory": ([*JOB, "--memory", "4Gi", "--shm", "8Gi"], ["/dev/shm would use all", "8Gi of 4Gi"]),
    "fewer CPUs than ranks": ([*JOB, "--cpus", "1"], ["more ranks than CPUs", "--cpus 2"]),
    "namespace with capitals": ([*JOB, "--namespace", "My_Team"], ["namespace: 'My_Team'", "--namespace my-team"]),
    "job name with a digit first": ([*JOB, "--job-name", "3d"], ["job_name: '3d'", "a letter first", "run-3d"]),
    "job name too long": ([*JOB, "--job-name", "x" * 51], ["job_name: ", "up to 50"]),
    "job name too long for a pod of a jobset": (
        [*JOB, "--api", "jobset", "--job-name", "x" * 49],
        ["job_name: ", "up to 48"],
    ),
    "queue with a slash": ([*JOB, "--queue", "team/gpu"], ["queue: 'team/gpu'", "--queue team-gpu"]),
    "mount not absolute": ([*JOB, "--mount", "claim:models"], ["mount: 'claim:models'", "--mount claim:/models"]),
    "mount without path": ([*JOB, "--mount", "claim"], ["mount: 'claim'", "CLAIM:/PATH"]),
    "mount with dots": ([*JOB, "--mount", "claim:/a/../runs"], ["without .."]),
    "mount on another": ([*JOB, "--mount", "claim:/runs/x"], ["two volumes at one path", "/runs/x and /runs"]),
    "mount with a wrong mode": ([*JOB, "--mount", "claim:/x:rx"], ["mount: 'claim:/x:rx'", ":ro"]),
    "variable without value": ([*JOB, "--env", "A"], ["not a variable", "NAME=VALUE"]),
    "variable of the launcher": ([*JOB, "--env", "PACELINE_NODE=0"], ["belongs to the launcher"]),
    "variable twice": ([*JOB, "--env", "A=1", "--env", "A=2"], ["--env gives A twice"]),
    "variable of the manifest": ([*JOB, "--env", "HOME=/root"], ["HOME belongs to the launcher"]),
    "variable of the pods": ([*JOB, "--env", "PACELINE_START_TIMEOUT_S=5"], ["belongs to the launcher"]),
    "memory of a part of a byte": ([*JOB, "--memory", "8.1Gi"], ["memory: '8.1Gi'", "--memory 8295Mi"]),
    "shm of a part of a byte": ([*JOB, "--shm", "0.3Gi"], ["shm: '0.3Gi'", "whole number of bytes"]),
    "pull secret twice": (
        [*JOB, "--image-pull-secret", "a", "--image-pull-secret", "a"],
        ["--image-pull-secret gives a twice"],
    ),
    "secret twice": ([*JOB, "--secret", "a,a"], ["--secret gives a twice"]),
    "selector twice": ([*JOB, "--node-selector", "a=1", "--node-selector", "a=2"], ["gives a twice"]),
    "toleration twice": ([*JOB, "--toleration", "a", "--toleration", "a"], ["gives a twice"]),
    "GPU without its domain": ([*JOB, "--gpu-resource", "gpu"], ["gpu_resource: 'gpu'", "nvidia.com/gpu"]),
    "resource without its domain": ([*JOB, "--resource", "hca=1"], ["resource: 'hca=1'", "rdma/hca=1"]),
    "resource without number": ([*JOB, "--resource", "rdma/hca"], ["resource: 'rdma/hca'"]),
    "GPUs as a resource": ([*JOB, "--resource", "nvidia.com/gpu=1"], ["--gpus-per-node N"]),
    "resource of the cluster's own": ([*JOB, "--resource", "kubernetes.io/x=1"], ["resource: ", "kubernetes.io"]),
    "resource below the cluster's own": ([*JOB, "--resource", "a.kubernetes.io/x=1"], ["resource: ", "kubernetes.io"]),
    "resource as a quota": (
        [*JOB, "--resource", "requests.nvidia.com/gpu=1"],
        ["resource: 'requests.nvidia.com/gpu=1'"],
    ),
    "resource of a long domain": ([*JOB, "--resource", "a" * 245 + "/b=1"], ["resource: "]),
    "GPU of the cluster's own": ([*JOB, "--gpu-resource", "kubernetes.io/gpu"], ["gpu_resource: ", "nvidia.com/gpu"]),
    "GPU as a quota": ([*JOB, "--gpu-resource", "requests.nvidia.com/gpu"], ["gpu_resource: ", "nvidia.com/gpu"]),
    "a part of a huge page": ([*JOB, "--resource", "hugepages-2Mi=3Mi"], ["page, 2Mi", "hugepages-2Mi=4Mi"]),
    "huge pages of decimal bytes": ([*JOB, "--resource", "hugepages-2Mi=4M"], ["page, 2Mi", "hugepages-2Mi=4Mi"]),
    "no huge pages": ([*JOB, "--resource", "hugepages-1Gi=0"], ["page, 1Gi", "hugepages-1Gi=1Gi"]),
    "huge pages without size": ([*JOB, "--resource", "hugepages-0Mi=2Mi"], ["resource: 'hugepages-0Mi=2Mi'"]),
    "secret with two dots": ([*JOB, "--secret", "a..b"], ["secret: 'a..b'", "--secret a-b"]),
    "claim with a dash before a dot": ([*JOB, "--runs", "a-.b"], ["runs: 'a-.b'"]),
    "variable of a secret with two dots": ([*JOB, "--env", "A=secret:a..b/k"], ["not a variable"]),
    "variable of the key of dots": ([*JOB, "--env", "A=secret:a/.."], ["not a variable"]),
    "variable of a key that begins with dots": ([*JOB, "--env", "A=secret:a/..k"], ["not a variable"]),
    "queue longer than a label": ([*JOB, "--queue", "q" * 64], ["queue: ", "up to 63"]),
    "label of a domain with two dots": ([*JOB, "--label", "a..b/c=d"], ["label: 'a..b/c=d'"]),
    "label of a long domain": ([*JOB, "--label", "a" * 254 + "/c=d"], ["label: "]),
    "old label of a node": (
        [*JOB, "--node-selector", "beta.kubernetes.io/arch=amd64"],
        ["node_selector: ", "--node-selector kubernetes.io/arch=amd64"],
    ),
    "old annotation": (
        [*JOB, "--annotation", "scheduler.alpha.kubernetes.io/critical-pod="],
        ["annotation: ", "--priority-class"],
    ),
    "annotation of a profile": (
        [*JOB, "--annotation", "container.apparmor.security.beta.kubernetes.io/train=x"],
        ["annotation: ", "leave it out"],
    ),
    "annotations that are too long": (
        [*JOB, *(word for key in "abc" for word in ("--annotation", f"{key}={'x' * 90_000}"))],
        ["--annotation holds too much text", "262,144"],
    ),
    "image with two slashes": ([*JOB, "--image", "team//paceline:1"], ["image: 'team//paceline:1'"]),
    "image with two dots": ([*JOB, "--image", "team/pace..line:1"], ["image: 'team/pace..line:1'"]),
    "image of a team with capitals": ([*JOB, "--image", "Team/paceline:1"], ["--image team/paceline:1"]),
    "image with a long name": ([*JOB, "--image", "team/" + "b" * 251 + ":1"], ["image: "]),
    "capability with its prefix": ([*JOB, "--capability", "CAP_IPC_LOCK"], ["--capability IPC_LOCK"]),
    "all capabilities": ([*JOB, "--capability", "ALL"], ["capability: 'ALL'"]),
    "annotation without value": ([*JOB, "--annotation", "a"], ["annotation: 'a'", "KEY=VALUE"]),
    "label of the manifest": ([*JOB, "--label", "app.kubernetes.io/instance=x"], ["does not set itself"]),
    "ephemeral storage without unit": ([*JOB, "--ephemeral-storage", "20"], ["ephemeral_storage: '20'", "20Gi"]),
    "scheduler of a trainjob": ([*JOB, "--api", "trainjob", "--scheduler", "volcano"], ["decides --scheduler"]),
    "node timeout twice": (
        [*JOB, "--node-timeout-s", "60", "--toleration", "node.kubernetes.io/unreachable:NoExecute"],
        ["given twice"],
    ),
    "selector without value": ([*JOB, "--node-selector", "gpu"], ["node_selector: 'gpu'", "KEY=VALUE"]),
    "toleration of a wrong effect": (
        [*JOB, "--toleration", "gpu:NoScheduling"],
        ["toleration: 'gpu:NoScheduling'", "--toleration gpu:NoSchedule"],
    ),
    "root": ([*JOB, "--user", "0"], ["user: '0'", "not run as root"]),
    "a port of the system's": ([*JOB, "--port", "80"], ["port is out of range", "from 1024"]),
    "time with letters": ([*JOB, "--time", "2h"], ["not a time limit", "'2h'"]),
    "grace above the time": ([*JOB, "--time", "1", "--grace-s", "60"], ["would end before it starts"]),
    "runtime of a job": ([*JOB, "--runtime", "mine"], ["only a trainjob has a runtime", "--api trainjob"]),
    "secret of a trainjob": (
        [*JOB, "--api", "trainjob", "--secret", "wandb"],
        ["decides --secret", "--api jobset"],
    ),
    "data the pods do not see": (
        ["cifar10-cnn", *JOB[1:], "--data-dir", "/home/me/data"],
        ["pods would not find this path", "/home/me/data", "--data CLAIM"],
    ),
    "weights the pods do not see": ([*JOB, "--weights", "w.pt"], ["pods would not find this path", "w.pt"]),
    "pictures nowhere": (["folder-resnet50", *JOB[1:]], ["the folder of pictures is missing", "--data CLAIM"]),
    "resume of another run": ([*JOB, "--resume", "runs/other"], ["folder of its own run", "--output-dir runs/other"]),
    "switch with a value": ([*JOB, "--dry-run=yes"], ["--dry-run takes no value"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_gives_one_screen(case: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, expected = WRONG[case]
    assert submit(*arguments) == USER
    screen = capsys.readouterr().err
    for text in expected:
        assert text in screen, screen
    assert len(screen.splitlines()) <= MOST_LINES
    assert list(home.iterdir()) == []  # nothing was started


@pytest.mark.parametrize("words", [["k8s", "shapes-cnn"], ["kubernets", "shapes-cnn"]])
def test_which_scheduler(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", *words]) == USER
    assert "paceline submit kubernetes shapes-cnn" in capsys.readouterr().err


def test_without_the_client_the_extra_is_named(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("paceline.integrations.kubernetes.client.importlib.util.find_spec", lambda name: None)
    assert submit(*JOB) == USER
    screen = capsys.readouterr().err
    assert how_to_install("kubernetes") in screen
    assert list(home.iterdir()) == []


def test_flags_of_submit_differ_from_those_of_train() -> None:
    both = [name for name in fields_of(KubernetesJob) if find_field(name)]
    assert both == []


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert submit("--help") == 0
    out = capsys.readouterr().out
    for setting in fields_of(KubernetesJob).values():
        assert setting.flag in out
    assert max(map(len, out.splitlines())) <= 130


# --- The manifest -----------------------------------------------------------------------------------------------------


def test_the_same_arguments_give_the_same_manifest(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for _ in range(2):
        assert submit(*JOB, "--job-name", "demo", "--output-dir", "runs/demo", "--dry-run") == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    head = [line for line in texts[0].splitlines() if line.startswith("#")]
    assert head[0] == "# demo: 4 ranks on 2 nodes. Written by paceline 0.1.0:"
    assert head[1].startswith("#   paceline submit kubernetes shapes-cnn --image")
    assert "--dry-run" not in head[1]
    assert "&id" not in texts[0]
    assert not Path("runs").exists()


def test_the_pods_of_a_gang_can_reach_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    service, _, job = manifest(capsys, *JOB, "--job-name", "demo", "--output-dir", "runs/demo", "--epochs", "3")
    assert service["kind"] == "Service"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    spec, pod = job["spec"], pod_of(job)
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 2, 2)
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    assert pod["subdomain"] == service["metadata"]["name"] == "demo"
    (container,) = pod["containers"]
    assert container["command"] == ["python", "-P", "-m", "paceline.integrations.kubernetes.pod"]
    assert container["args"] == [
        *("train", "shapes-cnn", "--epochs=3", "--processes=2", "--device=cpu", "--omp-num-threads=1"),
        *("--output-dir=/runs/demo", "--resume=auto"),
    ]
    variables = {item["name"]: item for item in container["env"]}
    assert variables["PACELINE_NODES"]["value"] == "2"
    assert variables["PACELINE_LEADER"]["value"] == "demo-0.demo:29400"
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert variables["PACELINE_NODE"]["valueFrom"]["fieldRef"]["fieldPath"] == index


@pytest.mark.parametrize("api", ["job", "jobset", "trainjob"])
@pytest.mark.parametrize("nodes", [1, 2, 10, 11, 100, 101, 10_000])
def test_the_longest_job_name_leaves_space_for_its_pods(api: Api, nodes: int) -> None:
    """A DNS label has 63 letters. JobSets add NAME-node-0-INDEX-xxxxx, Jobs need NAME-INDEX as a host name."""
    longest = longest_name(api, nodes)
    assert len("x" * longest + f"-{nodes - 1}") <= 63
    if api != "job":
        assert len("x" * longest + f"-node-0-{nodes - 1}-abcde") == 63
        assert longest_name("trainjob", nodes, "mine") + len("-dataset-initializer-0") <= 63


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="aB0-_. \u00e9", max_size=70), st.integers(min_value=8, max_value=50))
@example("a-" + "1" * 49, 50)
@example("1" * 45 + "-1", 50)
@example("1" * 45 + "-" + "1" * 4, 50)
def test_a_name_is_valid_for_a_service(text: str, longest: int) -> None:
    """A letter first, no dash at either end, never too long."""
    name = as_name(text, longest)
    assert name == "" or re.fullmatch(r"[a-z]([a-z0-9-]*[a-z0-9])?", name)
    assert len(name) <= longest


@pytest.mark.parametrize("api", ["job", "jobset", "trainjob"])
def test_a_long_run_folder_gives_a_valid_name(api: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder's name is shortened to the limit of this kind of job. Its end is kept."""
    words = [*JOB, "--api", api, "--output-dir", "runs/" + "1-" * 40 + "20261115"]
    name = manifest(capsys, *words)[-1]["metadata"]["name"]
    assert len(name) <= longest_name("job" if api == "job" else "jobset", 2)
    assert re.fullmatch(r"run-[1-]*-20261115", name)


def test_pods_of_a_job_are_on_different_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    """The manifest requires one pod per node, for every kind of job."""
    for api in ("job", "jobset", "trainjob"):
        (affinity,) = find_all(manifest(capsys, *JOB, "--api", api, "--job-name", "demo")[-1], "affinity")
        assert affinity == {
            "podAntiAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [
                    {
                        "labelSelector": {"matchLabels": {"app.kubernetes.io/instance": "demo"}},
                        "topologyKey": "kubernetes.io/hostname",
                    }
                ]
            }
        }


def test_the_limit_of_failures_is_per_pod_and_grows_with_the_time(capsys: pytest.CaptureFixture[str]) -> None:
    """Three failures are few for a week. Pods that stop together do not delay each other."""
    for flags, most in (([], 3), (["--time", "7-00"], 21), (["--time", "7-01", "--retries", "2"], 16)):
        spec = manifest(capsys, *JOB, *flags)[-1]["spec"]
        assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"], "backoffLimit" in spec) == (most, 0, False)
        spec = manifest(capsys, *JOB, *flags, "--api", "jobset")[-1]["spec"]
        assert spec["failurePolicy"]["maxRestarts"] == most
        inner = spec["replicatedJobs"][0]["template"]["spec"]
        assert (inner["backoffLimitPerIndex"], inner["maxFailedIndexes"]) == (0, 0)


def test_a_start_timeout_below_the_back_off_gets_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    """The default covers the longest delay of the Job controller. A shorter one gives a warning."""
    for flags, warnings in (([], 0), (["--start-timeout-s", "599"], 1), (["--start-timeout-s", "600"], 0)):
        assert submit(*JOB, *flags, "--dry-run") == 0
        assert capsys.readouterr().err.count("warning: --start-timeout-s") == warnings


@pytest.mark.parametrize(
    "image",
    [
        "paceline:1",
        "localhost/paceline:1",
        "localhost:5000/team/paceline:1",
        "registry:5000/a/b:1",
        "Registry.Example.com/a/b__c-d.e:1.0_x",
        "a/b/c@sha256:" + "0" * 64,
    ],
)
def test_images_that_registries_have(image: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Names that container runtimes accept are accepted."""
    job = manifest(capsys, *JOB, "--image", image)[-1]
    assert pod_of(job)["containers"][0]["image"] == image


def test_requests_and_limits_of_huge_pages_are_equal(capsys: pytest.CaptureFixture[str]) -> None:
    """The API server requires equal requests and limits, and CPUs or memory with them."""
    flags = [
        "--resource",
        "hugepages-2Mi=1Gi",
        "--resource",
        "hugepages-1Gi=2Gi",
        "--resource",
        "nvidia.com/mig-1g.5gb=1",
    ]
    resources = pod_of(manifest(capsys, *JOB, *flags)[-1])["containers"][0]["resources"]
    assert resources["requests"] == resources["limits"]
    assert {"cpu", "memory"} < set(resources["requests"])
    assert resources["limits"]["hugepages-2Mi"] == "1Gi"
    assert resources["limits"]["hugepages-1Gi"] == "2Gi"


def test_resources_capabilities_and_marks_of_the_pods(capsys: pytest.CaptureFixture[str]) -> None:
    """RDMA, gang schedulers and local disks have their own flags."""
    flags = ["--annotation", "k8s.v1.cni.cncf.io/networks=a, b", "--label", "scheduling.x-k8s.io/pod-group=g"]
    flags += ["--resource", "rdma/hca=1", "--capability", "IPC_LOCK", "--scheduler", "volcano"]
    flags += ["--ephemeral-storage", "20Gi", "--node-timeout-s", "60"]
    job = manifest(capsys, *JOB, *flags, "--job-name", "demo")[-1]
    metadata, pod = job["spec"]["template"]["metadata"], pod_of(job)
    (container,) = pod["containers"]
    assert metadata["annotations"] == {"k8s.v1.cni.cncf.io/networks": "a, b"}
    assert metadata["labels"]["scheduling.x-k8s.io/pod-group"] == "g"
    assert metadata["labels"]["app.kubernetes.io/instance"] == "demo"
    for kind in ("requests", "limits"):
        assert container["resources"][kind]["rdma/hca"] == "1"
        assert container["resources"][kind]["ephemeral-storage"] == "20Gi"
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert pod["schedulerName"] == "volcano"
    assert {"name": "tmp", "emptyDir": {"sizeLimit": "20Gi"}} in pod["volumes"]
    gone = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60}
    assert pod["tolerations"] == [
        {"key": "node.kubernetes.io/not-ready", **gone},
        {"key": "node.kubernetes.io/unreachable", **gone},
    ]


@pytest.mark.parametrize("api", ["job", "jobset", "trainjob"])
def test_the_manifest_says_how_its_objects_are_deleted_with_the_job(
    api: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """After kubectl apply, one command makes the job the owner of all other objects."""
    assert submit(*JOB, "--api", api, "--job-name", "demo", "--dry-run") == 0
    text = capsys.readouterr().out
    *beside, job = yaml.safe_load_all(text)
    (line,) = re.findall(r"^#   (kubectl patch .*)$", text, re.MULTILINE)
    words = shlex.split(line.replace("$uid", "the-uid"))
    names = words[2 : words.index("--type")]
    wanted = [f"{item['kind'].lower()}/{item['metadata']['name']}" for item in beside]
    assert names == [*wanted, "secret/demo-secret"]
    (owner,) = json.loads(words[-1])["metadata"]["ownerReferences"]
    assert owner == {"apiVersion": job["apiVersion"], "kind": job["kind"], "name": "demo", "uid": "the-uid"}


def test_one_node_needs_no_gang(capsys: pytest.CaptureFixture[str]) -> None:
    _, job = manifest(capsys, *BARE, "--processes-per-node", "2")
    (container,) = pod_of(job)["containers"]
    assert container["command"] == ["python", "-P", "-m", "paceline"]
    names = [item["name"] for item in container["env"] if item["name"].startswith("PACELINE_")]
    assert names == ["PACELINE_MACHINE"]
    assert "successPolicy" not in job["spec"]


@pytest.mark.parametrize("api", ["job", "jobset", "trainjob"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_only_pods_of_the_same_job_reach_each_other(api: str, nodes: int, capsys: pytest.CaptureFixture[str]) -> None:
    """SECURITY.md: each manifest has a NetworkPolicy that selects its own pods and allows nothing else."""
    words = [*BARE, "--nodes", str(nodes), "--processes-per-node", "2", "--api", api, "--job-name", "demo"]
    objects = manifest(capsys, *words)
    (policy,) = [item for item in objects if item["kind"] == "NetworkPolicy"]
    assert (policy["apiVersion"], policy["spec"]["policyTypes"]) == ("networking.k8s.io/v1", ["Ingress"])
    own = {"podSelector": {"matchLabels": {"app.kubernetes.io/instance": "demo"}}}
    assert policy["spec"]["podSelector"] == own["podSelector"]
    assert policy["spec"]["ingress"] == ([{"from": [own]}] if nodes > 1 else [])
    pods = find_all(objects[-1], "labels")
    assert any(labels["app.kubernetes.io/instance"] == "demo" for labels in pods)


@pytest.mark.parametrize("api", ["job", "jobset", "trainjob"])
def test_the_secret_of_a_gang_is_not_in_its_manifest(api: str, capsys: pytest.CaptureFixture[str]) -> None:
    """SECURITY.md: the manifest refers to the Secret. Its comment says how to create it without showing the value."""
    words = ["submit", "kubernetes", *JOB, "--api", api, "--job-name", "demo", "--dry-run"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "kind: Secret" not in text
    assert "# " + "  openssl rand -hex 32 | kubectl create secret generic demo-secret" in text
    assert "--from-literal" not in text
    (job,) = list(yaml.safe_load_all(text))[-1:]
    (env,) = find_all(job, "env")
    (row,) = [row for row in env if row["name"] == RUN_SECRET]
    assert row == {"name": RUN_SECRET, "valueFrom": {"secretKeyRef": {"name": "demo-secret", "key": RUN_SECRET}}}
    assert main([*words[:-1], "--env", f"{RUN_SECRET}=x", "--dry-run"]) == USER  # it would be in the manifest


@pytest.mark.parametrize("account", ["", "trainer"])
def test_pods_of_a_trainjob_get_no_token(account: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A TrainJob cannot set it for its pods: their own account does, or a mount hides the token."""
    given = ["--service-account", account] if account else []
    *beside, job = manifest(capsys, *JOB, "--api", "trainjob", "--job-name", "demo", *given)
    (patch,) = job["spec"]["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = patch["template"]["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == (account or "demo")
    accounts = [item for item in beside if item["kind"] == "ServiceAccount"]
    mounts = {mount["mountPath"]: mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    token = "/var/run/secrets/kubernetes.io/serviceaccount"
    assert {"name": mounts[token], "emptyDir": {}} in pod["volumes"]
    if account:
        assert accounts == []
    else:
        assert [(item["metadata"]["name"], item["automountServiceAccountToken"]) for item in accounts] == [
            ("demo", False)
        ]


def find_all(item: Any, name: str) -> list[Any]:
    """Every value with this key, at any depth."""
    if isinstance(item, list):
        return [found for part in item for found in find_all(part, name)]
    if not isinstance(item, dict):
        return []
    return ([item[name]] if name in item else []) + [found for part in item.values() for found in find_all(part, name)]


def test_exit_codes_become_a_failure_policy(capsys: pytest.CaptureFixture[str]) -> None:
    *_, job = manifest(capsys, *JOB, "--retries", "5")
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert rules[0]["action"] == "Ignore"
    assert rules[0]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    by_code = {code: rule["action"] for rule in rules[1:] for code in rule["onExitCodes"]["values"]}
    assert by_code == {75: "Ignore", 2: "FailJob", 3: "FailJob", 4: "FailJob", 5: "FailJob", 7: "FailJob", 8: "FailJob"}
    assert {rule["onExitCodes"]["containerName"] for rule in rules[1:]} == {pod_of(job)["containers"][0]["name"]}
    assert job["spec"]["backoffLimitPerIndex"] == 5
    assert pod_of(job)["restartPolicy"] == "Never"  # the policy covers no other code
    assert "activeDeadlineSeconds" not in job["spec"]


def test_pods_have_few_rights(capsys: pytest.CaptureFixture[str]) -> None:
    *_, job = manifest(capsys, *JOB, "--user", "2000:3000")
    pod = pod_of(job)
    assert pod["automountServiceAccountToken"] is False
    context = pod["securityContext"]
    assert (context["runAsNonRoot"], context["runAsUser"], context["runAsGroup"]) == (True, 2000, 3000)
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    writable = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert {"/runs", "/tmp", "/dev/shm"} == writable


def test_every_requested_setting_is_in_the_manifest(capsys: pytest.CaptureFixture[str]) -> None:
    *_, job = manifest(
        capsys,
        *("shapes-cnn", "--image", IMAGE, "--runs", "/srv/runs", "--data", "datasets", "--mount", "models:/models:ro"),
        *("--nodes", "2", "--gpus", "8", "--cpus", "16", "--memory", "96Gi", "--shm", "16Gi", "--time", "01:00:00"),
        *("--namespace", "vision", "--queue", "gpu-queue", "--priority-class", "high", "--service-account", "trainer"),
        *("--image-pull-secret", "registry", "--secret", "wandb,mlflow", "--env", "NCCL_DEBUG=WARN", "--env", "X=$(Y)"),
        *(
            "--node-selector",
            "accelerator=h100",
            "--toleration",
            "nvidia.com/gpu=yes:NoSchedule",
            "--toleration",
            "spot",
        ),
    )
    pod = pod_of(job)
    (container,) = pod["containers"]
    assert job["metadata"]["namespace"] == "vision"
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpu-queue"
    assert job["spec"]["suspend"] is True
    assert job["spec"]["activeDeadlineSeconds"] == 3600
    assert container["resources"]["limits"] == {"cpu": "16", "memory": "96Gi", "nvidia.com/gpu": "4"}
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert container["envFrom"] == [{"secretRef": {"name": "wandb"}}, {"secretRef": {"name": "mlflow"}}]
    values = {item["name"]: item.get("value") for item in container["env"]}
    assert values["NCCL_DEBUG"] == "WARN"
    assert values["X"] == "$$(Y)"  # Kubernetes turns it into $(Y)
    assert "--device=cuda" in container["args"]
    assert pod["nodeSelector"] == {"accelerator": "h100"}
    assert pod["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Equal", "value": "yes", "effect": "NoSchedule"},
        {"key": "spot", "operator": "Exists"},
    ]
    assert (pod["priorityClassName"], pod["serviceAccountName"]) == ("high", "trainer")
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    volumes = {item["name"]: item for item in pod["volumes"]}
    assert volumes["runs"]["hostPath"] == {"path": "/srv/runs", "type": "Directory"}
    assert volumes["data"]["persistentVolumeClaim"] == {"claimName": "datasets"}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    mounts = {item["mountPath"]: item for item in container["volumeMounts"]}
    assert mounts["/models"]["readOnly"] is True
    assert {item["name"] for item in container["volumeMounts"]} == set(volumes)


def test_data_is_searched_where_it_is_mounted(capsys: pytest.CaptureFixture[str]) -> None:
    def data_dir(*arguments: str) -> list[str]:
        job = manifest(capsys, "cifar10-cnn", *JOB[1:], *arguments)[-1]
        args = pod_of(job)["containers"][0]["args"]
        return [word for word in args if word.startswith("--data-dir")]

    assert data_dir() == ["--data-dir=/tmp"]  # each pod fetches it into an existing folder
    assert data_dir("--data", "datasets") == ["--data-dir=/data"]
    assert data_dir("--data", "datasets", "--data-dir", "/data/cifar") == ["--data-dir=/data/cifar"]


def test_a_users_recipe_and_functions_are_in_the_manifest(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "mine.yaml").write_text("dataset: shapes\nmodel_name: my_model.py:build\nnum_samples: 640\n")
    (home / "my_model.py").write_text("def build(num_classes):\n    return None\n")
    files, *_, job = manifest(capsys, "mine.yaml", *JOB[1:], "--job-name", "mine")
    assert files["kind"] == "ConfigMap"
    assert files["data"] == {name: (home / name).read_text() for name in ("mine.yaml", "my_model.py")}
    (container,) = pod_of(job)["containers"]
    assert container["args"][:2] == ["train", "/etc/paceline/mine.yaml"]
    assert "--model-name=/etc/paceline/my_model.py:build" in container["args"]
    assert {"name": "files", "configMap": {"name": "mine-files"}} in pod_of(job)["volumes"]
    assert {"name": "files", "mountPath": "/etc/paceline", "readOnly": True} in container["volumeMounts"]


def test_files_of_all_functions_are_in_the_manifest(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Data, model, loss and every metric: each file is in the ConfigMap, and each flag has its path there."""
    functions = "def build(num_classes): ...\n\ndef loss(logits, labels): ...\n\ndef near(logits, labels): ...\n"
    for name in ("data.py", "model.py", "loss.py", "metrics.py"):
        (home / name).write_text(f"# {name}\n{functions}")
    recipe = "loss: loss.py:loss\nmetrics: [metrics.py:near, ./metrics.py:build]\nlabel_smoothing: 0\n"
    (home / "mine.yaml").write_text(recipe)
    flags = ["--model-name", "model.py:build", "--dataset", "data.py:build"]
    config_map, *_, job = manifest(capsys, "mine.yaml", *JOB[1:], *flags)
    assert set(config_map["data"]) == {"mine.yaml", "data.py", "model.py", "loss.py", "metrics.py"}
    assert config_map["data"]["loss.py"] == (home / "loss.py").read_text()
    arguments = pod_of(job)["containers"][0]["args"]
    for argument in ("--model-name=/etc/paceline/model.py:build", "--dataset=/etc/paceline/data.py:build"):
        assert argument in arguments
    assert "--loss=/etc/paceline/loss.py:loss" in arguments
    start = arguments.index("--metrics")
    assert arguments[start + 1 : start + 3] == ["/etc/paceline/metrics.py:near", "/etc/paceline/metrics.py:build"]


def test_a_missing_loss_is_refused_at_submit(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Functions are checked here, not after hours in a queue."""
    assert submit(*JOB, "--loss", "gone.py:loss", "--dry-run") == USER
    assert "gone.py" in capsys.readouterr().err
    (home / "there.py").write_text("def other(logits, labels): ...\n")
    assert submit(*JOB, "--metrics", "there.py:near", "--dry-run") == USER
    assert "there.py" in capsys.readouterr().err


def test_two_files_of_one_name_are_kept_apart(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("a", "b"):
        (home / folder).mkdir()
        (home / folder / "own.py").write_text("def build(num_classes):\n    return None\n")
    own = ["--model-name", "a/own.py:build", "--dataset", "b/own.py:build"]
    assert submit(*JOB, *own, "--dry-run") == USER
    assert "two files of one name" in capsys.readouterr().err


def test_the_grace_depends_on_the_measured_save(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = home / "runs" / "demo"
    folder.mkdir(parents=True)
    again = [*JOB, "--output-dir", "runs/demo", "--resume", "auto"]

    def grace() -> int:
        seconds: int = pod_of(manifest(capsys, *again)[-1])["terminationGracePeriodSeconds"]
        return seconds

    assert grace() == 120
    (folder / "status.json").write_text(json.dumps({"status": "preempted", "step": 7, "save_s": 100.0}))
    assert grace() == 420
    assert submit(*again, "--grace-s", "60", "--dry-run") == USER
    assert "--grace-s 210" in capsys.readouterr().err


def test_a_finished_run_is_not_submitted_again(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = home / "runs" / "demo"
    folder.mkdir(parents=True)
    (folder / "status.json").write_text(json.dumps({"status": "finished", "step": 7}))
    (folder / "config.yaml").write_text("dataset: shapes\n")
    assert submit(*JOB, "--output-dir", "runs/demo") == 0
    assert "is finished (7 steps); nothing was submitted" in capsys.readouterr().out


def test_a_rehearsal_starts_a_new_run(capsys: pytest.CaptureFixture[str]) -> None:
    job = manifest(capsys, *JOB, "--rehearse")[-1]
    assert "--resume=auto" not in pod_of(job)["containers"][0]["args"]


# --- The gang ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codes", "nodes", "outcome"),
    [
        ({}, 2, None),
        ({0: 0}, 2, None),  # a finished pod waits: Kubernetes does not restart it
        ({1: 0, 0: 0}, 2, ("end", 0, -1)),
        ({1: USER}, 2, ("end", USER, 1)),
        ({0: INTERNAL, 1: DATA}, 3, ("end", DATA, 1)),
        ({1: INTERNAL, 0: 6}, 2, ("replace", INTERNAL, 1)),  # the first, not the lowest
        ({1: PREEMPTED}, 2, None),  # others may still save
        ({1: PREEMPTED, 0: PREEMPTED}, 2, ("restart", 0, -1)),
        ({1: PREEMPTED, 0: 143}, 2, ("restart", 0, -1)),
        ({1: 0, 0: PREEMPTED}, 2, ("restart", 0, -1)),
        ({1: 137}, 2, ("replace", 137, 1)),
    ],
)
def test_each_combination_of_exit_codes_has_an_outcome(
    codes: dict[int, int], nodes: int, outcome: tuple[str, int, int] | None
) -> None:
    found = decide(codes, nodes)
    assert (None if found is None else (found.action, found.code, found.node)) == outcome


def test_variables_of_a_pod_are_checked() -> None:
    secret = {RUN_SECRET: create_secret()}
    member = read_member({"PACELINE_NODES": "2", "PACELINE_NODE": "1", "PACELINE_LEADER": "a-0.a:29400", **secret})
    assert (member.host, member.ports, member.is_leader) == ("a-0.a", (29400,), False)
    for wrong in ({}, {"PACELINE_NODES": "2", "PACELINE_NODE": "2", "PACELINE_LEADER": "a:1"}):
        with pytest.raises(UserError):
            read_member({**wrong, **secret})


POD = """
import os, sys
from paceline.errors import PacelineError
from paceline.integrations.kubernetes import pod as kubernetes_pod
from paceline.integrations.kubernetes.pod import Pod, read_member
kubernetes_pod._FAILURE_IS_REPORTED_WITHIN_S = float(os.environ["REPORTED_WITHIN_S"])
try:
    code = Pod(read_member(), sys.argv[1:]).run()
except PacelineError as error:
    print(error.screen(), file=sys.stderr, flush=True)
    code = error.exit_code
os._exit(code)
"""


class Gang:
    """Pods as processes of this machine. A shell script replaces the training."""

    def __init__(self, folder: Path, script: str) -> None:
        self.folder = folder
        self.pods: list[subprocess.Popen[str]] = []
        self.secret = create_secret()
        (folder / "train.sh").write_text(f'node=${{PACELINE_AGENT%%/*}}\necho $node >>"starts"\n{script}\n')
        with socket.create_server(("", 0)) as server:
            self.port = server.getsockname()[1]

    def start(
        self, node: int, timeout_s: float = 20, nodes: int = 2, reported_within_s: float = 0.1
    ) -> subprocess.Popen[str]:
        place = {"PACELINE_NODES": str(nodes), "PACELINE_NODE": str(node), "PACELINE_LEADER": f"127.0.0.1:{self.port}"}
        place[RUN_SECRET] = self.secret
        place["REPORTED_WITHIN_S"] = str(reported_within_s)
        pod = subprocess.Popen(
            [sys.executable, "-c", POD, "sh", "train.sh"],
            cwd=self.folder,
            env=environment(PACELINE_START_TIMEOUT_S=str(timeout_s), **place),
            text=True,
            stderr=subprocess.PIPE,
        )
        self.pods.append(pod)
        return pod

    def wait_for(self, *lines: str) -> None:
        """Wait until the trainings of these nodes have started this number of times."""
        path = self.folder / "starts"
        for _ in range(2000):
            if path.exists() and sorted(path.read_text().split()) == sorted(lines):
                return
            with pytest.raises(subprocess.TimeoutExpired):  # a pod that ends here is a failure
                self.pods[-1].wait(0.01)
        raise AssertionError(path.read_text() if path.exists() else "nothing began")

    def end(self) -> None:
        for pod in self.pods:
            if pod.poll() is None:
                pod.kill()
            pod.communicate()


@pytest.fixture
def gangs(tmp_path: Path) -> Iterator[list[Gang]]:
    made: list[Gang] = []
    yield made
    for gang in made:
        (gang.folder / "go").touch()  # also ends stand-ins whose pod was killed
        gang.end()


def make_gang(gangs: list[Gang], folder: Path, script: str) -> Gang:
    gangs.append(Gang(folder, script))
    return gangs[-1]


WAIT = "while [ ! -e go ]; do sleep 0.02; done"


def test_pods_with_a_stand_in_training_end_together(gangs: list[Gang], tmp_path: Path) -> None:
    gang = make_gang(gangs, tmp_path, f'[ "$node" = 1 ] || {WAIT}')
    first, second = gang.start(0), gang.start(1)
    gang.wait_for("0", "1")
    with pytest.raises(subprocess.TimeoutExpired):  # its own training has finished, the other has not
        second.wait(0.3)
    (tmp_path / "go").touch()
    assert (first.wait(10), second.wait(10)) == (0, 0)


def test_a_user_error_in_one_pod_ends_the_stand_in_training_of_all(gangs: list[Gang], tmp_path: Path) -> None:
    gang = make_gang(gangs, tmp_path, f'[ "$node" = 0 ] || exit 2; {WAIT}')
    first, second = gang.start(0), gang.start(1)
    assert (first.wait(15), second.wait(15)) == (USER, USER)


def test_the_log_of_node_0_has_the_error_of_another_pod_with_a_stand_in_training(
    gangs: list[Gang], tmp_path: Path
) -> None:
    """The controller deletes the other pods. Node 0 ends first, and prints the last lines of the others."""
    gang = make_gang(gangs, tmp_path, f'[ "$node" = 0 ] || {{ echo "no data on node 1" >&2; exit 3; }}; {WAIT}')
    first, second = gang.start(0), gang.start(1, reported_within_s=60)
    _, words = first.communicate(timeout=20)
    assert first.returncode == DATA
    assert "no data on node 1" in words
    assert second.poll() is None
    second.send_signal(signal.SIGTERM)  # like the controller
    _, words = second.communicate(timeout=20)
    assert second.returncode == DATA
    assert "no data on node 1" in words  # its own log also has it


@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_pod_is_awaited_and_the_stand_in_training_restarts(
    lost: int, gangs: list[Gang], tmp_path: Path
) -> None:
    gang = make_gang(gangs, tmp_path, WAIT)
    pods = [gang.start(0), gang.start(1)]
    gang.wait_for("0", "1")
    pods[lost].kill()
    pods[lost] = gang.start(lost)  # like the Job controller
    gang.wait_for("0", "1", "0", "1")
    (tmp_path / "go").touch()
    assert [pod.wait(10) for pod in pods] == [0, 0]


def test_only_the_pod_that_failed_first_is_replaced_with_a_stand_in_training(gangs: list[Gang], tmp_path: Path) -> None:
    fail = "{ until grep -q 0 starts; do sleep 0.02; done; touch failed; exit 70; }"
    gang = make_gang(gangs, tmp_path, f'[ "$node" = 0 ] || [ -e failed ] || {fail}; {WAIT}')
    first, second = gang.start(0), gang.start(1)
    assert second.wait(10) == INTERNAL
    third = gang.start(1)
    gang.wait_for("0", "1", "0", "1")
    (tmp_path / "go").touch()
    assert (first.wait(10), third.wait(10)) == (0, 0)


def test_a_stop_request_to_one_pod_keeps_the_others_with_a_stand_in_training(gangs: list[Gang], tmp_path: Path) -> None:
    # Like real ranks: one gets the request, all save and end with 75.
    stop = "trap 'touch stop; exit 75' TERM; while [ ! -e go ]; do [ ! -e stop ] || exit 75; sleep 0.02; done"
    gang = make_gang(gangs, tmp_path, stop)
    first, second = gang.start(0), gang.start(1)
    gang.wait_for("0", "1")
    second.send_signal(signal.SIGTERM)
    assert second.wait(10) == PREEMPTED
    (tmp_path / "stop").unlink()
    third = gang.start(1)
    gang.wait_for("0", "1", "0", "1")
    (tmp_path / "go").touch()
    assert (first.wait(10), third.wait(10)) == (0, 0)


def test_an_incomplete_gang_names_the_missing_nodes(gangs: list[Gang], tmp_path: Path) -> None:
    gang = make_gang(gangs, tmp_path, WAIT)
    leader, follower = gang.start(0, timeout_s=1, nodes=3), gang.start(1, timeout_s=1, nodes=3)
    _, words = leader.communicate(timeout=15)
    assert leader.returncode == INTERNAL
    assert " of 3 nodes did not arrive within 1 s" in words
    assert re.search(r"missing: node (1, )?2\n", words)  # node 1 may have given up earlier
    _, words = follower.communicate(timeout=15)
    assert "within 1 s" in words
    assert not (tmp_path / "starts").exists()


def test_foreigns_at_the_door_change_nothing_for_a_stand_in_training(gangs: list[Gang], tmp_path: Path) -> None:
    gang = make_gang(gangs, tmp_path, WAIT)
    first = gang.start(0)
    for words in (b"GET / HTTP/1.1\r\n\r\n", b'{"type": "hello", "node": [1]}\n', b"[]\n", b""):
        for _ in range(500):
            try:
                foreign = socket.create_connection(("127.0.0.1", gang.port), timeout=5)
                break
            except ConnectionRefusedError:  # the leader is still starting
                with pytest.raises(subprocess.TimeoutExpired):
                    first.wait(0.02)
        with foreign:
            foreign.sendall(words)
            if words:
                assert foreign.recv(10) == b""  # closed
    second = gang.start(1)
    gang.wait_for("0", "1")
    (tmp_path / "go").touch()
    assert (first.wait(10), second.wait(10)) == (0, 0)


def reach(gang: Gang, leader: subprocess.Popen[str], secret: str) -> Peer:
    """A connection to the leader that has proved this secret."""
    for _ in range(500):
        try:
            return connect("127.0.0.1", gang.port, secret.encode(), "pods of a job")
        except ConnectionRefusedError:  # the leader is still starting
            with pytest.raises(subprocess.TimeoutExpired):
                leader.wait(0.02)
    raise AssertionError("the leader does not listen")


HELLO = encode(Hello(1, "a", "a", 1, 0))
ENDED = encode(Ended(USER, ""))
PLAIN_TEXT = [json.dumps(message).encode() + b"\n" for message in (HELLO, ENDED)]


def test_a_hello_without_the_secret_does_nothing_to_a_stand_in_training(gangs: list[Gang], tmp_path: Path) -> None:
    """SECURITY.md: `hello` and `ended` of a client without the secret neither join the gang nor end the leader."""
    gang = make_gang(gangs, tmp_path, WAIT)
    first, second = gang.start(0), gang.start(1)
    gang.wait_for("0", "1")
    with pytest.raises(NotProved):
        reach(gang, first, create_secret())
    for words in (*PLAIN_TEXT, b"x" * (1 << 20)):
        with socket.create_connection(("127.0.0.1", gang.port), timeout=10) as foreign, suppress(ConnectionError):
            foreign.sendall(words)
            assert foreign.recv(10) == b""
    with pytest.raises(subprocess.TimeoutExpired):
        first.wait(0.3)
    (tmp_path / "go").touch()
    assert (first.wait(10), second.wait(10)) == (0, 0)
    assert sorted((tmp_path / "starts").read_text().split()) == ["0", "1"]  # nothing was restarted
    _, words_of_leader = first.communicate(timeout=10)
    assert words_of_leader.count("warning: dropped what 127.0.0.1 sent: ") == 4


def test_malformed_messages_of_a_pod_are_dropped_by_a_stand_in_training(gangs: list[Gang], tmp_path: Path) -> None:
    """Even from a pod that knows the secret: they neither end nor crash the leader."""
    gang = make_gang(gangs, tmp_path, WAIT)
    first = gang.start(0, nodes=3)
    gang.start(1, nodes=3)
    for hello in (
        {**HELLO, "node": 0},
        {**HELLO, "node": 3},
        {**HELLO, "node": "1"},
        {**HELLO, "node": True},
        ENDED,
        {},
    ):
        peer = reach(gang, first, gang.secret)
        peer.send(hello)
        assert peer.receive() is None  # closed
        peer.close()
    peer = reach(gang, first, gang.secret)
    peer.send({**HELLO, "node": 2})
    gang.wait_for("0", "1")
    start = decode(peer.receive() or {})
    assert isinstance(start, Start)
    assert [node.node for node in start.nodes] == [0, 1, 2]
    for code in ("x", -1, 256, None, True):
        peer.send({**ENDED, "code": code})
    wrong: tuple[dict[str, Any], ...] = ({**HELLO, "node": 2}, HELLO, {"a": []}, encode(Upload("k", "")))
    for message in (*wrong, {**ENDED, "more": 1}):
        peer.send(message)
    peer.send(encode(Ended(0, "")))
    peer.send(ENDED)  # a pod ends once
    (tmp_path / "go").touch()
    outcome = decode(peer.receive() or {})
    assert isinstance(outcome, Outcome)
    assert (outcome.action, outcome.code) == ("end", 0)
    assert first.wait(10) == 0
    peer.close()


OUTCOME = encode(Outcome("replace", 1, 0, "a reason"))


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"type": "outcome"},
        {**OUTCOME, "type": ["outcome"]},
        {**OUTCOME, "action": "rm"},
        {**OUTCOME, "code": "x"},
        {**OUTCOME, "node": -2},
        {**OUTCOME, "reason": "x" * 5000},
        {**encode(Start((Hello(0, "a", "a", 1, 0),), 1, {})), "nodes": [{"node": 0}]},
        {**encode(Start((), 1, {})), "plan": []},
        {**encode(Start((), 1, {})), "nodes": 3},
    ],
)
def test_a_malformed_message_is_our_own_error(message: dict[str, Any]) -> None:
    """Not a TypeError or a KeyError."""
    with pytest.raises(MalformedMessage):
        decode(message)


@pytest.mark.parametrize(
    "message",
    [
        Hello(1, "host", "machine", 8, 2),
        Start((Hello(0, "a", "b", 1, 0),), 29500, {"keys": ["k"]}),
        Ended(75, "text"),
        Upload("key", ""),
        Outcome("end", 0, -1, "all nodes have finished"),
    ],
)
def test_messages_survive_a_round_trip(message: Any) -> None:
    assert decode(json.loads(json.dumps(encode(message)))) == message
