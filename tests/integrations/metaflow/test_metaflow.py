"""Flows, run like a user does: real Metaflow, its local datastore, two nodes on this machine."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from harness.cli import Answer, command, environment, paceline
from harness.processes import kill_all_in, processes_in
from harness.runs import read_results
from harness.torchvision_shim import ON_CPU
from paceline.metrics.recorder import read_rows

pytestmark = [pytest.mark.flows, pytest.mark.timeout(600)]
NEEDS = ("metaflow", "metaflow_extensions", "moto", "kubernetes", "timm")
EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "metaflow"
# Forty steps on two ranks, about twenty per second.
RECIPE = """
dataset: shapes
num_samples: 1480
model_name: cnn
base_lr: 0.2
schedule: onecycle
log_frequency: 1
"""
PARAMETERS = ["--recipe", "tiny.yaml", "--epochs", "2", "--batch-size", "64", "--cluster-size", "2"]
STEPS = 40
# Prints all facts of a run that the tests need, with Metaflow's client.
READ_RUN = """
import json, sys
from metaflow import Run, namespace
namespace(None)
run = Run(sys.argv[1])
names = ("results", "history", "test_accuracy", "test", "model")
found = {name: getattr(run.data, name, None) for name in names}
found["successful"] = run.successful
if "train" in [step.id for step in run]:
    tasks = sorted(run["train"], key=lambda task: len(task.id))
    found["attempts"] = tasks[0].current_attempt + 1
    found["nodes"] = [task.id for task in tasks]
print(json.dumps(found))
"""


@dataclass(frozen=True)
class Place:
    """A folder for a user's machine: working folder, Metaflow's home, temporary files."""

    path: Path

    def variables(self, **extra: str) -> dict[str, str]:
        (self.path / "tmp").mkdir(exist_ok=True)
        # A flow starts its tasks as `python`: it must be this one.
        found = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return {
            "PATH": found,
            "METAFLOW_HOME": str(self.path / "home"),
            "METAFLOW_DATASTORE_SYSROOT_LOCAL": str(self.path / "store"),
            "USERNAME": "tester",
            "TMPDIR": str(self.path / "tmp"),
            **extra,
        }

    def flow(self, script: str, *arguments: str, **extra: str) -> Answer:
        words = (sys.executable, str(EXAMPLES / script), *arguments)
        return command(*words, cwd=self.path, timeout_s=560, env=self.variables(**extra))

    @contextmanager
    def started(self, script: str, *arguments: str, **extra: str) -> Iterator[subprocess.Popen[str]]:
        """A running flow, with its output in out.txt. The block ends all its processes."""
        with (
            (self.path / "out.txt").open("w") as out,
            subprocess.Popen(
                [sys.executable, str(EXAMPLES / script), *arguments],
                cwd=self.path,
                env=environment(**self.variables(**extra)),
                text=True,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            ) as process,
        ):
            try:
                yield process
            finally:
                kill_all_in(self.path)
        assert processes_in(self.path) == []

    def read_run(self, pathspec: str) -> dict[str, Any]:
        words = (sys.executable, "-c", READ_RUN, pathspec)
        answer = command(*words, cwd=self.path, env=self.variables())
        assert answer.code == 0, answer.err
        shown: dict[str, Any] = json.loads(answer.out.splitlines()[-1])
        return shown


@dataclass(frozen=True)
class FlowRun:
    place: Place
    out: str

    @property
    def pathspec(self) -> str:
        (number, *_) = re.findall(r"run-id (\d+)", self.out)
        return f"PacelineFlow/{number}"

    @cached_property
    def shown(self) -> dict[str, Any]:
        return self.place.read_run(self.pathspec)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    path = tmp_path_factory.mktemp("metaflow")
    (path / "tiny.yaml").write_text(RECIPE)
    return Place(path)


@pytest.fixture(scope="module")
def undisturbed(place: Place) -> FlowRun:
    answer = place.flow("flow.py", "run", *PARAMETERS)
    assert answer.code == 0, answer.out + answer.err
    return FlowRun(place, answer.out)


@pytest.fixture(scope="module")
def trained_without_a_flow(place: Place) -> Path:
    flags = ["--epochs=2", "--global-batch-size=64", "--processes=2", "--output-dir=alone"]
    # Ranks of one node would add in shared memory, which rounds the norm of the gradients differently.
    answer = paceline("train", "tiny.yaml", *flags, cwd=place.path, PACELINE_NODE_MEMORY="off")
    assert answer.code == 0, answer
    return place.path / "alone"


def what_was_computed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows without times and memory."""
    names = ("kind", "step", "epoch", "phase", "loss", "accuracy", "lr", "grad_norm")
    return [{name: row[name] for name in names if name in row} for row in rows]


# --- The same result


def test_two_nodes_of_a_flow_give_the_bits_of_two_processes(undisturbed: FlowRun, trained_without_a_flow: Path) -> None:
    shown, alone = undisturbed.shown, read_results(trained_without_a_flow)
    assert shown["successful"]
    assert shown["nodes"] == ["2", "2_node_1"]
    assert shown["results"]["weights_sha256"] == alone["weights_sha256"]
    assert shown["results"]["world_size"] == 2
    rows = what_was_computed(read_rows(trained_without_a_flow / "metrics.jsonl"))
    assert what_was_computed(shown["history"]) == rows
    assert [row["step"] for row in rows if row["kind"] == "step"] == list(range(1, STEPS + 1))


def test_a_missing_default_tracker_is_one_line(undisturbed: FlowRun) -> None:
    """The guide's install line does not install TensorBoard: the flow trains without it and prints one note."""
    assert undisturbed.out.count("[tensorboard]'") == 1


def own_lines(out: str) -> list[str]:
    """The output of our steps, without Metaflow's own."""
    texts = [line.partition("] ")[2] for line in out.splitlines() if re.match(r"\S+ \S+ \[\d+/", line)]
    return [text for text in texts if not text.startswith(("Task ", "[@"))]


def test_a_run_has_fewer_than_thirty_lines_of_our_own(undisturbed: FlowRun) -> None:
    """For any metrics interval: a line per epoch, none per step."""
    lines = own_lines(undisturbed.out)
    assert len(lines) < 30, lines
    assert [line.split()[1] for line in lines if line.startswith("epoch ")] == ["1/2", "2/2"]


def test_no_message_names_a_deleted_folder(undisturbed: FlowRun, disturbed: FlowRun) -> None:
    """Of a finished run, and of killed attempts."""
    for run in (undisturbed, disturbed):
        assert str(run.place.path / "tmp") not in run.out
        assert "paceline-flow-" not in run.out
    assert "resumed   at step" in disturbed.out


@pytest.mark.parametrize("name", ["", "root"], ids=["no name", "root"])
def test_a_flow_starts_for_a_user_without_a_name(name: str, place: Place) -> None:
    """As in the shell of a container. Metaflow refuses to start there. Our `start` reaches its own check."""
    users = {"USERNAME": name, "USER": name, "SUDO_USER": "", "METAFLOW_USER": ""}
    answer = place.flow("flow.py", "run", "--recipe", "no-such-recipe", **users)
    assert "there is no recipe 'no-such-recipe'" in answer.out + answer.err


def test_a_missing_chosen_tracker_is_refused_in_start(place: Place) -> None:
    answer = place.flow("flow.py", "run", "--flags", "--track tensorboard")
    assert answer.code == 1
    assert "flag --track" in answer.out + answer.err
    assert "/train/" not in answer.out + answer.err


def test_no_node_leaves_its_folder(undisturbed: FlowRun) -> None:
    assert not list((undisturbed.place.path / "tmp").glob("paceline-*"))


# --- The model


def test_the_accuracy_is_an_artifact(undisturbed: FlowRun, trained_without_a_flow: Path) -> None:
    shown, alone = undisturbed.shown, read_results(trained_without_a_flow)
    assert shown["test_accuracy"] == shown["results"]["test_accuracy"] == alone["test_accuracy"]
    assert shown["test"]["samples"] == alone["test"]["samples"]
    assert shown["test"]["confusion_matrix"] == alone["test"]["confusion_matrix"]


def test_another_flow_tests_the_model_and_labels_pictures(undisturbed: FlowRun) -> None:
    saved = undisturbed.shown["model"]
    assert "/shapes_cnn_" in saved["key"]
    said = saved["metadata"]
    assert (said["model_name"], said["epochs"], said["batch_size"], said["learning_rate"]) == ("cnn", 2, 64, 0.2)
    answer = undisturbed.place.flow("test_flow.py", "run", "--model-key", saved["key"])
    assert answer.code == 0, answer.out + answer.err
    tested = undisturbed.place.read_run("PacelineTestFlow/" + re.findall(r"run-id (\d+)", answer.out)[0])
    assert tested["test_accuracy"] == undisturbed.shown["test_accuracy"]
    assert tested["test"]["step"] in (STEPS // 2, STEPS)


def test_the_flow_trains_and_tests_a_model_of_timm(place: Place) -> None:
    """`--model-name resnet50d`, from timm of the extra: two steps on two nodes, and a test of the saved model."""
    few = ["--recipe", "tiny.yaml", "--batch-size", "64", "--train-from-scratch", "1", "--flags", "--max-steps 2"]
    answer = place.flow("flow.py", "run", *few, "--model-name", "resnet50d", PYTHONPATH=str(ON_CPU))
    assert answer.code == 0, answer.out + answer.err
    shown = FlowRun(place, answer.out).shown
    assert shown["model"]["metadata"]["model_name"] == "timm:resnet50d"
    assert shown["results"]["steps"] == 2
    assert shown["test"]["samples"] == 1000


# --- The card


def test_cards_show_curves_nodes_and_checkpoints(undisturbed: FlowRun) -> None:
    # Metaflow stores local cards in the working folder, for any datastore.
    tasks = undisturbed.place.path / ".metaflow" / "mf.cards" / undisturbed.pathspec.replace("/", "/runs/")
    cards = [tasks.glob(f"steps/train/tasks/{node}/cards/blank-training-*.html") for node in ("2", "2_node_1")]
    main, worker = (next(iter(found)).read_text() for found in cards)
    for text in ("vega-lite", "validation", "| main |", "| worker |", ".paceline.0`", "best, latest"):
        assert text in decoded(main), text
    assert "node 1 of 2" in decoded(worker)
    assert "vega-lite" not in decoded(worker)


def test_the_card_of_the_test_has_accuracies_and_the_confusion_matrix(undisturbed: FlowRun) -> None:
    """The results of `test_model`: the value of the artifact, every class, and the confusion matrix."""
    tasks = undisturbed.place.path / ".metaflow" / "mf.cards" / undisturbed.pathspec.replace("/", "/runs/")
    (page,) = tasks.glob("steps/test_model/tasks/*/cards/blank-test-*.html")
    test, text = undisturbed.shown["test"], decoded(page.read_text())
    assert f"**{test['test_accuracy']:.2%}** of {test['samples']:,} samples" in text
    assert len(test["class_accuracy"]) == 10
    assert [name for name in test["class_accuracy"] if f"| {name} | " not in text] == []
    counts = [int(count) for count in re.findall(r'"samples": (\d+)', text)]
    assert sorted(counts) == sorted(count for row in test["confusion_matrix"] for count in row if count)


def decoded(card: str) -> str:
    """A card has its contents as base64 JSON in the page."""
    parts = re.findall(r'"([A-Za-z0-9+/=]{400,})"', card)
    return "".join(base64.b64decode(part).decode(errors="replace") for part in parts)


# --- Failures


@pytest.fixture(scope="module")
def disturbed(place: Place, tmp_path_factory: pytest.TempPathFactory) -> FlowRun:
    """Attempt 1: a rank of the other node is killed. Attempt 2: the main node's task is killed with SIGKILL.

    As root, the other node has its own disk, new and empty in each attempt.
    """
    broken = Place(tmp_path_factory.mktemp("disturbed"))
    shutil.copy(place.path / "tiny.yaml", broken.path)
    extra = {"PATH": own_disks(broken)} if can_mount() else {}
    # A checkpoint must be in the datastore before each end, and steps take milliseconds. First the rank that is not
    # killed pauses. In the second attempt, without injected faults, all ranks are stopped meanwhile.
    flags = "--save-steps 5 --inject 'kill rank=1 step=13; slow rank=0 step=12 seconds=6'"
    with broken.started("flow.py", "run", *PARAMETERS, "--flags", flags, **extra) as process:
        main = wait_until_trained(broken, process, attempt=2, step=23)
        with ranks_held(broken):
            wait_for_checkpoint_in_store(broken, process, attempt=2)
            os.kill(main, signal.SIGKILL)
        code = process.wait(560)
    out = (broken.path / "out.txt").read_text()
    assert code == 0, out
    return FlowRun(broken, out)


def can_mount() -> bool:
    words = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs none /mnt"]
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def own_disks(place: Place) -> str:
    """A search path whose `python` gives every node except the main one an empty disk for temporary files."""
    script = place.path / "bin" / "python"
    script.parent.mkdir()
    mount = 'mount -t tmpfs none "$TMPDIR" && exec "$0" "$@"'
    script.write_text(
        "#!/bin/sh\n"
        'if [ "${MF_PARALLEL_NODE_INDEX:-0}" -gt 0 ] && [ -z "$HAS_OWN_DISK" ]; then\n'
        f"    HAS_OWN_DISK=yes exec unshare --mount sh -c '{mount}' {sys.executable} \"$@\"\n"
        "fi\n"
        f'exec {sys.executable} "$@"\n'
    )
    script.chmod(0o755)
    return f"{script.parent}:{os.environ['PATH']}"


def wait_until_trained(place: Place, process: subprocess.Popen[str], *, attempt: int, step: int) -> int:
    """Wait until the main node has trained to this step in this attempt. Returns its task's process."""
    while process.poll() is None:
        out = (place.path / "out.txt").read_text()
        starts = re.findall(r"train/2 \(pid (\d+)\)\] Task is starting", out)
        if len(starts) == attempt and any(row["step"] >= step for row in metrics_rows(place)):
            return int(starts[-1])
        time.sleep(0.01)
    raise AssertionError((place.path / "out.txt").read_text())


@contextmanager
def ranks_held(place: Place) -> Iterator[None]:
    """Stop the ranks of all nodes with SIGSTOP. Processes that save and upload continue."""
    ranks = []
    for pid in processes_in(place.path):
        with suppress(OSError):  # it ended meanwhile
            if b"forkserver" in (Path("/proc") / str(pid) / "cmdline").read_bytes():
                ranks.append(pid)
    assert len(ranks) >= 2
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in ranks:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def wait_for_checkpoint_in_store(place: Place, process: subprocess.Popen[str], *, attempt: int) -> None:
    notes = place.path / "store" / ".metaflow" / "mf.checkpoints" / "checkpoints" / "metadata"
    while not list(notes.rglob(f"{attempt - 1}.paceline.*.metadata")):
        assert process.poll() is None, (place.path / "out.txt").read_text()
        time.sleep(0.01)


def metrics_rows(place: Place) -> list[dict[str, Any]]:
    """The rows of the node with rank 0, on its own disk or on ours."""
    roots = {Path("/proc") / str(pid) / "root" for pid in processes_in(place.path)}
    rows: list[dict[str, Any]] = []
    for root in roots:
        with suppress(OSError):  # it ended meanwhile, and its disk is removed
            for path in (root / str(place.path / "tmp").lstrip("/")).glob("*/run/metrics.jsonl"):
                rows += read_rows(path)
    return rows


def test_killed_attempts_resume_from_the_datastore_and_end_with_the_same_bits(
    disturbed: FlowRun, undisturbed: FlowRun
) -> None:
    shown = disturbed.shown
    assert shown["successful"]
    assert shown["attempts"] == 3
    assert shown["results"]["weights_sha256"] == undisturbed.shown["results"]["weights_sha256"]
    assert what_was_computed(shown["history"]) == what_was_computed(undisturbed.shown["history"])
    assert shown["test_accuracy"] == undisturbed.shown["test_accuracy"]


def test_the_faults_were_injected_and_each_attempt_names_its_starting_step(disturbed: FlowRun) -> None:
    assert "rank 1 was ended by SIGKILL" in disturbed.out
    assert "forward of step 13" in disturbed.out
    origins = re.findall(r"\] (From .*) \(load policy fresh\)", disturbed.out)
    assert origins[0] == "From the beginning"
    steps = [
        int(re.fullmatch(rf"From step (\d+) of {disturbed.pathspec}/train/2, attempt {number}", origin)[1])  # type: ignore[index]
        for number, origin in enumerate(origins[1:], start=1)
    ]
    assert len(steps) == 2
    assert 5 <= steps[0] <= 12
    assert steps[0] <= steps[1] <= STEPS
    resumed = [int(step) for step in re.findall(r"resumed +at step (\d+)", disturbed.out)]
    assert resumed == steps
    if can_mount():
        assert disturbed.out.count("node 1 has a disk of its own") == 3


# --- From one run to the next


def test_an_interrupted_flow_is_resumed_from_its_checkpoints(
    place: Place, undisturbed: FlowRun, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """`flow.py resume` after power loss continues from the newest checkpoint of the origin run, to the same weights."""
    cut = Place(tmp_path_factory.mktemp("cut"))
    shutil.copy(place.path / "tiny.yaml", cut.path)
    flags = "--save-steps 5 --inject 'slow rank=0 step=22 seconds=60'"
    with cut.started("flow.py", "run", *PARAMETERS, "--flags", flags) as process:
        wait_for_checkpoint_in_store(cut, process, attempt=1)
    interrupted = FlowRun(cut, (cut.path / "out.txt").read_text())
    answer = cut.flow("flow.py", "resume")
    assert answer.code == 0, answer.out + answer.err
    resumed = FlowRun(cut, answer.out)
    assert resumed.pathspec != interrupted.pathspec
    (origin,) = re.findall(r"\] From step (\d+) of (PacelineFlow/\d+)/train/2, attempt 1", resumed.out)
    assert origin[1] == interrupted.pathspec
    assert re.findall(r"resumed +at step (\d+)", resumed.out) == [origin[0]]
    assert resumed.shown["results"]["weights_sha256"] == undisturbed.shown["results"]["weights_sha256"]
    assert what_was_computed(resumed.shown["history"]) == what_was_computed(undisturbed.shown["history"])


def test_eager_skips_a_newer_run_with_other_settings(undisturbed: FlowRun) -> None:
    """`start` selects the newest compatible checkpoint, and training resumes from it."""
    place = undisturbed.place
    few = ["--recipe", "tiny.yaml", "--epochs", "1", "--batch-size", "64", "--cluster-size", "1"]
    other = place.flow("flow.py", "run", *few, "--flags", "--seed 7 --max-steps 2", "--load-policy", "eager")
    assert other.code == 0, other.out + other.err
    # In brackets: the newest skipped run, which may be from another test in this folder.
    assert "From the beginning: no earlier run has a checkpoint for this one (PacelineFlow/" in other.out
    longer = [*PARAMETERS, "--epochs", "3", "--load-policy", "eager"]
    answer = place.flow("flow.py", "run", *longer)
    assert answer.code == 0, answer.out + answer.err
    run = FlowRun(place, answer.out)
    chosen = f"From step {STEPS} of {undisturbed.pathspec}/train/2, attempt 1"
    assert re.findall(rf"/start/1 .*\] {chosen}$", run.out, re.MULTILINE)
    assert re.findall(r"resumed +at step (\d+)", run.out) == [str(STEPS)]
    assert run.shown["results"]["steps"] == STEPS + STEPS // 2
    assert run.shown["attempts"] == 1


# --- Clusters: only the compiled templates


@pytest.fixture(scope="module")
def object_store() -> Iterator[dict[str, str]]:
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1"}
    boto3.client(
        "s3", endpoint_url=url, region_name="us-east-1", aws_access_key_id="x", aws_secret_access_key="x"
    ).create_bucket(Bucket="flows")
    store = {"METAFLOW_S3_ENDPOINT_URL": url, "METAFLOW_DATASTORE_SYSROOT_S3": "s3://flows/metaflow"}
    yield {**keys, **store, "METAFLOW_DEFAULT_DATASTORE": "s3"}
    server.stop()


@pytest.mark.parametrize(
    ("script", "options"), [("flow.py", ["--with", "kubernetes:image=paceline"]), ("flow_torchrun.py", [])]
)
def test_argo_template_schedules_the_gang_as_a_jobset(
    script: str, options: list[str], place: Place, object_store: dict[str, str]
) -> None:
    answer = place.flow(script, *options, "argo-workflows", "create", "--only-json", **object_store)
    assert answer.code == 0, answer.err
    template = json.loads(answer.out[answer.out.index("{") :])
    assert template["kind"] == "WorkflowTemplate"
    train = next(part for part in template["spec"]["templates"] if part["name"] == "train")
    manifest = train["resource"]["manifest"]
    assert "kind: JobSet" in manifest
    assert "jobset.x-k8s.io/v1alpha2" in manifest
    assert "name: MF_WORLD_SIZE" in manifest


# --- Mistakes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--epochs", "0"], ["epochs is out of range", "--epochs", "1 or more"]),
        (["--cluster-size", "3"], ["global_batch_size 256 is not divisible by 3", "--batch-size 255 or 258"]),
    ],
)
def test_a_wrong_parameter_gives_one_screen_before_training(
    arguments: list[str], words: list[str], place: Place
) -> None:
    answer = place.flow("flow.py", "run", *arguments)
    out = answer.out + answer.err
    assert answer.code == 1
    assert "Traceback" not in out
    assert "/train/" not in out
    for word in words:
        assert word in out
