"""Kubernetes and its operators accept the manifests, and the manifests train if they are read like a kubelet does.

There is no cluster here. The schemas are the published ones. The pods are processes of this machine, started only
from the manifest, with folders as volumes and with pod names at the loopback address.
"""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from harness.cli import paceline
from harness.fake_slurm import clean_home
from harness.processes import kill_all_in
from harness.runs import read_results, step_losses
from harness.sockets import free_port
from paceline.cli.main import main
from paceline.runtime.secret import RUN_SECRET, create_secret

pytestmark = pytest.mark.flows
NEEDS = ("kubernetes_validate", "kubeflow_trainer_api")

ROOT = Path(__file__).resolve().parents[3]
IMAGE = "registry.example.com/team/paceline:0.1.0"
BARE = ["synthetic-mlp", "--image", IMAGE, "--runs", "paceline-runs"]
EVERYTHING = [
    *("--data", "/srv/data", "--mount", "models:/models:ro", "--cpus", "16", "--memory", "96Gi", "--shm", "16Gi"),
    *(
        "--time",
        "01:00:00",
        "--grace-s",
        "300",
        "--start-timeout-s",
        "60",
        "--namespace",
        "vision",
        "--queue",
        "gpu-queue",
    ),
    *("--service-account", "trainer", "--image-pull-secret", "registry", "--env", "NCCL_DEBUG=WARN"),
    *("--node-selector", "accelerator=h100", "--toleration", "nvidia.com/gpu:NoSchedule", "--user", "2000"),
    *("--annotation", "a.example.com/b=c d", "--label", "scheduling.x-k8s.io/pod-group=g", "--resource", "rdma/hca=1"),
    *("--capability", "IPC_LOCK", "--ephemeral-storage", "20Gi", "--node-timeout-s", "60"),
]
NOT_FOR_TRAINJOBS = ["--scheduler", "volcano", "--priority-class", "high", "--secret", "wandb", "--retries", "5"]
SHAPES = {
    "one node": ["--processes-per-node", "2"],
    "CPUs": ["--nodes", "2", "--processes-per-node", "2"],
    "GPUs": ["--nodes", "4", "--gpus-per-node", "8"],
    "everything": ["--nodes", "2", "--gpus", "8", *EVERYTHING],
    "own recipe": ["--nodes", "2", "--processes-per-node", "1"],
}
VERSIONS = ("1.30", "1.33", "1.37")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    clean_home(tmp_path, monkeypatch)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def manifest(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    assert main(["submit", "kubernetes", *arguments, "--dry-run"]) == 0, capsys.readouterr().err
    return list(yaml.safe_load_all(capsys.readouterr().out))


# --- Schemas ----------------------------------------------------------------------------------------------------------


def validate(item: dict[str, Any]) -> None:
    import kubernetes_validate

    for version in VERSIONS:
        kubernetes_validate.validate(item, version, strict=True)


def as_job(spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "inner"}, "spec": spec}


def by_model(model: Any, item: dict[str, Any]) -> None:
    """The model accepts it and knows every field. It would drop unknown fields."""
    assert model.from_dict(item).to_dict() == item


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("api", ["job", "jobset", "trainjob"])
def test_published_schemas_accept(api: str, shape: str, home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from kubeflow_trainer_api import models

    arguments = [*BARE, *SHAPES[shape], "--api", api]
    if shape == "own recipe":
        (home / "mine.yaml").write_text("dataset: synthetic\nmodel_name: mlp\n")
        arguments[0] = "mine.yaml"
    if shape == "everything" and api != "trainjob":
        arguments += NOT_FOR_TRAINJOBS
    *beside, main_object = manifest(capsys, *arguments)
    for item in beside:
        validate(item)
    if api == "job":
        validate(main_object)
    elif api == "jobset":
        by_model(models.JobsetV1alpha2JobSet, main_object)
        (replicated,) = main_object["spec"]["replicatedJobs"]
        validate(as_job(replicated["template"]["spec"]))
    else:
        by_model(models.TrainerV1alpha1TrainJob, main_object)


def test_the_schemas_detect_errors(capsys: pytest.CaptureFixture[str]) -> None:
    import kubernetes_validate
    from kubeflow_trainer_api import models

    *_, job = manifest(capsys, *BARE, *SHAPES["CPUs"])
    job["spec"]["template"]["spec"]["subDomain"] = "typo"
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(job)
    *_, jobset = manifest(capsys, *BARE, *SHAPES["CPUs"], "--api", "jobset")
    jobset["spec"]["failurePolicy"]["maxRestart"] = 3
    with pytest.raises(AssertionError):
        by_model(models.JobsetV1alpha2JobSet, jobset)


def test_a_jobset_restarts_all_its_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    *_, jobset = manifest(capsys, *BARE, *SHAPES["CPUs"], "--api", "jobset", "--retries", "4", "--job-name", "demo")
    policy, (replicated,) = jobset["spec"]["failurePolicy"], jobset["spec"]["replicatedJobs"]
    assert policy["maxRestarts"] == 4
    assert ("FailJobSet", ["PodFailurePolicy"]) in [(r["action"], r["onJobFailureReasons"]) for r in policy["rules"]]
    assert replicated["template"]["spec"]["backoffLimitPerIndex"] == 0
    env = replicated["template"]["spec"]["template"]["spec"]["containers"][0]["env"]
    leader = next(item["value"] for item in env if item["name"] == "PACELINE_LEADER")
    network = jobset["spec"]["network"]
    assert leader.partition(":")[0] == f"demo-{replicated['name']}-0-0.{network['subdomain']}"
    assert network["enableDNSHostnames"] is True


def test_a_trainjob_uses_a_runtime(capsys: pytest.CaptureFixture[str]) -> None:
    *_, trainjob = manifest(capsys, *BARE, *SHAPES["GPUs"], "--api", "trainjob", "--job-name", "demo")
    spec = trainjob["spec"]
    assert spec["runtimeRef"]["name"] == "torch-distributed"
    assert (spec["trainer"]["numNodes"], spec["trainer"]["numProcPerNode"]) == (4, 8)
    assert spec["trainer"]["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == "8"
    (patch,) = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = patch["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert "env" not in container  # only the trainer may have one


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "kubernetes").glob("*.yaml")), ids=lambda path: path.name)
def test_examples_equal_the_output_of_their_commands(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = path.read_text()
    command = re.search(r"^#   paceline (submit kubernetes .*)$", text, re.MULTILINE)
    if command is None:
        for item in yaml.safe_load_all(text):
            validate(item)
        return
    monkeypatch.chdir(ROOT)
    assert main([*command[1].split(), "--dry-run"]) == 0
    assert capsys.readouterr().out == text


# --- Read like a kubelet ----------------------------------------------------------------------------------------------


class Kubelet:
    """Starts the pods of an Indexed Job as processes: command, variables, volumes and names only from the manifest."""

    def __init__(self, objects: list[dict[str, Any]], folder: Path) -> None:
        self.folder = folder
        by_kind = {item["kind"]: item for item in objects}
        self.secret = create_secret()  # kubectl create secret, as in the comment of the manifest
        self.job, self.files = by_kind["Job"], by_kind.get("ConfigMap")
        self.spec = self.job["spec"]["template"]["spec"]
        (self.container,) = self.spec["containers"]
        self.hosts = self._names(by_kind["Service"])
        self._numbers = itertools.count()

    def claim(self, name: str) -> Path:
        return self.folder / "claims" / name

    def _names(self, service: dict[str, Any]) -> dict[str, str]:
        """The names in the cluster's DNS: pods that a headless Service selects, in its subdomain."""
        assert service["spec"]["clusterIP"] == "None"
        labels = self.job["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"].items() <= labels.items()
        assert self.spec["subdomain"] == service["metadata"]["name"]
        pods = [f"{self.job['metadata']['name']}-{index}" for index in range(self.job["spec"]["completions"])]
        return {f"{pod}.{self.spec['subdomain']}": "127.0.0.1" for pod in pods}

    def start(self, index: int) -> Pod:
        place = self.folder / f"pod-{next(self._numbers)}"
        mounts = {mount["mountPath"]: self._volume(mount["name"], place) for mount in self.container["volumeMounts"]}
        variables = {"PATH": "/usr/bin:/bin"}
        for item in self.container["env"]:
            value = item.get("value")
            if "secretKeyRef" in item.get("valueFrom", {}):
                assert item["valueFrom"]["secretKeyRef"]["key"] == RUN_SECRET
                value = self.secret
            elif value is None:
                values = {"metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index)}
                values["spec.nodeName"] = f"node-{index}"
                value = values[item["valueFrom"]["fieldRef"]["fieldPath"]]
            variables[item["name"]] = self._local(self._expand(value, variables), mounts)
        words = [*self.container["command"], *self.container["args"]]
        words = [self._local(self._expand(word, variables), mounts) for word in words]
        assert words[0] == "python"
        work_dir = Path(self._local(self.container["workingDir"], mounts))
        with (place / "log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, *words[1:]], cwd=work_dir, env=variables, stdout=log, stderr=subprocess.STDOUT
            )
        return Pod(process, work_dir, place / "log")

    def _volume(self, name: str, place: Path) -> Path:
        volume = next(item for item in self.spec["volumes"] if item["name"] == name)
        if "persistentVolumeClaim" in volume:
            path = self.claim(volume["persistentVolumeClaim"]["claimName"])
        else:
            path = place / name
        path.mkdir(parents=True, exist_ok=True)
        if "configMap" in volume:
            assert self.files is not None
            for file, text in self.files["data"].items():
                (path / file).write_text(text)
        return path

    @staticmethod
    def _expand(text: str, variables: dict[str, str]) -> str:
        return re.sub(r"\$(\$)?\((\w+)\)", lambda m: f"$({m[2]})" if m[1] else variables.get(m[2], m[0]), text)

    def _local(self, text: str, mounts: dict[str, Path]) -> str:
        for host, address in self.hosts.items():
            text = text.replace(host, address)
        paths = "|".join(map(re.escape, mounts))
        return re.sub(rf"(^|=)({paths})(?=/|$|:)", lambda match: f"{match[1]}{mounts[match[2]]}", text)


class Pod:
    def __init__(self, process: subprocess.Popen[bytes], work_dir: Path, log: Path) -> None:
        self.process, self.work_dir, self._log = process, work_dir, log

    @property
    def log(self) -> str:
        return self._log.read_text()

    def evict(self) -> int:
        self.process.terminate()
        return self.wait()

    def kill(self) -> None:
        """Kill all its processes at once, as if its node died."""
        kill_all_in(self.work_dir)
        self.process.wait(20)

    def wait(self, timeout_s: float = 100) -> int:
        return self.process.wait(timeout_s)


@pytest.fixture
def pods() -> Iterator[list[Pod]]:
    started: list[Pod] = []
    yield started
    for pod in started:
        pod.kill()


RECIPE = """\
dataset: synthetic
model_name: mlp
num_samples: 480
global_batch_size: 32
epochs: 2
log_frequency: 1
"""
# Slow enough to be disturbed. The fault is injected once, and does not change a number.
SLOW = "slow rank=0 step=8 steps=400 seconds=0.2 times=2"


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], str]:
    """Losses and weights of the undisturbed run: two local ranks of one command."""
    folder = tmp_path_factory.mktemp("here")
    (folder / "mine.yaml").write_text(RECIPE)
    words = ["train", "mine.yaml", "--processes=2", "--omp-num-threads=1", "--device=cpu", "--track"]
    done = paceline(*words, "--output-dir", "run", cwd=folder)
    assert done.code == 0, done.err
    return losses_and_weights(folder / "run")


def losses_and_weights(run: Path) -> tuple[list[float], str]:
    return step_losses(run), read_results(run)["weights_sha256"]


def kubelet_for(home: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> Kubelet:
    (home / "mine.yaml").write_text(RECIPE)
    gang = [
        "--nodes",
        "2",
        "--processes-per-node",
        "1",
        "--port",
        str(free_port()),
        "--output-dir",
        "runs/demo",
        "--track",
    ]
    return Kubelet(manifest(capsys, "mine.yaml", *BARE[1:], *gang, *flags), home)


@pytest.mark.timeout(240)
def test_pods_as_processes_have_the_result_of_one_machine(
    home: Path, pods: list[Pod], wanted: tuple[list[float], str], capsys: pytest.CaptureFixture[str]
) -> None:
    kubelet = kubelet_for(home, capsys)
    pods += [kubelet.start(0), kubelet.start(1)]
    assert [pod.wait() for pod in pods] == [0, 0], pods[0].log + pods[1].log
    assert losses_and_weights(kubelet.claim("paceline-runs") / "demo") == wanted
    assert "2 ranks on 2 nodes" in pods[0].log + pods[1].log


@pytest.mark.timeout(240)
def test_pods_as_processes_are_evicted_and_killed_and_have_the_same_result(
    home: Path, pods: list[Pod], wanted: tuple[list[float], str], capsys: pytest.CaptureFixture[str]
) -> None:
    kubelet = kubelet_for(home, capsys, "--save-steps", "2", "--inject", SLOW)
    run = kubelet.claim("paceline-runs") / "demo"
    gang = [kubelet.start(0), kubelet.start(1)]
    pods += gang
    wait_for_step(run, 8, gang)
    assert gang[1].evict() == 75  # after a stop request it saves, as does the other pod, which stays
    gang[1] = kubelet.start(1)  # like the Job controller
    pods.append(gang[1])
    wait_for_step(run, 12, gang)
    gang[0].kill()  # the leader, which writes
    gang[0] = kubelet.start(0)
    pods.append(gang[0])
    assert [pod.wait() for pod in gang] == [0, 0], gang[0].log + gang[1].log
    assert "resumed   at step" in gang[0].log + gang[1].log
    assert losses_and_weights(run) == wanted


def wait_for_step(run: Path, step: int, gang: list[Pod]) -> None:
    """Wait until a checkpoint of this step or a later one is complete."""
    for _ in range(3000):
        saved = [int(path.parent.name.removeprefix("step-")) for path in run.glob("checkpoints/step-*/manifest.json")]
        if saved and max(saved) >= step:
            assert json.loads((run / "status.json").read_text())["status"] != "finished", "the run finished too early"
            return
        with pytest.raises(subprocess.TimeoutExpired):  # a pod that ends now is a failure
            gang[0].wait(0.02)
    raise AssertionError(f"no checkpoint of step {step}: {gang[0].log}{gang[1].log}")
