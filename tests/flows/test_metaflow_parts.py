"""The parts of the Metaflow integration by themselves: parameters, the gang of nodes, checkpoints on their way."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.cli import paceline
from paceline.checkpoints.format import step_folders, verify
from paceline.errors import CheckpointError, PacelineError, UserError
from paceline.integrations.metaflow.courier import Courier
from paceline.integrations.metaflow.gang import Gang, Message, Place, meet, read_answer
from paceline.integrations.metaflow.request import StartPoint, check_request
from paceline.launch.request import check_loaded
from paceline.runs.folder import RunFolder
from paceline.runtime.peers import MalformedMessage, connect
from paceline.runtime.secret import NotProved, create_secret
from paceline.settings.load import load_config
from paceline.training.inject import flip_a_bit

pytestmark = pytest.mark.flows
NEEDS = ("metaflow", "metaflow_extensions")
SECRET = create_secret().encode()

# --- Parameters


@pytest.mark.parametrize(
    ("parameters", "what", "said"),
    [
        ({"recipe": "shapes-cn"}, "recipe", "shapes-cnn"),
        ({"recipe": "no/such.yaml"}, "recipe", "no/such.yaml"),
        ({"model_name": "model.py"}, "no model", "model.py:build"),
        ({"batch_size": 0}, "out of range", "--batch-size"),
        ({"batch_size": 250, "cluster_size": 4}, "not divisible by 4", "--batch-size 248 or 252"),
        ({"test_batch_size": -1}, "out of range", "--test-batch-size"),
        ({"epochs": 0}, "out of range", "1 or more"),
        ({"learning_rate": -0.1}, "out of range", "--learning-rate"),
        ({"learning_rate": float("nan")}, "out of range", "--learning-rate"),
        ({"train_from_scratch": 2}, "switch", "0 or 1"),
        ({"train_from_scratch": 0}, "no published ImageNet weights", "cnn"),
        ({"flags": "--optimiser adam"}, "unknown", "--optimizer"),
        ({"flags": "--optimizer adaam"}, "not valid", "adam"),
        ({"flags": "--epochs 3", "epochs": 2}, "given twice", "--epochs and --flags"),
        ({"flags": "--processes 2"}, "the flow decides", "--processes-per-node"),
        ({"flags": "--resume auto"}, "the flow decides", "--load-policy"),
        ({"flags": "--output-dir here"}, "the flow decides", "--work-dir"),
        ({"flags": "--inject 'kil step=3'"}, "", "kill"),
        ({"flags": "--optimizer 'adam"}, "cannot be read", "--flags"),
        ({"flags": "--track mlflow"}, "mlflow is not installed", "flag --track"),
        ({"flags": "adam"}, "unexpected argument", "which start with"),
        ({"flags": "--strategy single", "cluster_size": 2}, "one process", "--cluster-size 1"),
        ({"cluster_size": 0}, "cluster-size", "from 1"),
        ({"cluster_size": 5000}, "cluster-size", "1024"),
        ({"processes_per_node": -1}, "processes-per-node", "from 1"),
        ({"load_policy": "lazy"}, "load policy", "fresh"),
        ({"node_timeout": 0.0}, "node-timeout", "more than 0"),
    ],
)
def test_wrong_parameters_are_named(parameters: dict[str, Any], what: str, said: str) -> None:
    with pytest.raises(UserError) as raised:
        check_request(**{"recipe": "shapes-cnn", **parameters})
    screen = raised.value.screen()
    assert what in screen
    assert said in screen


@pytest.mark.parametrize(
    ("model_name", "what"), [("resnet50d", "no model"), ("timm:resnet50d", "timm is not installed"), ("nonet", "cnn")]
)
def test_without_timm_its_models_are_refused_with_how_to_install_it(
    model_name: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extra brings timm; a paceline that was installed without the extra may lack it."""
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UserError) as raised:
        check_request(recipe="shapes-cnn", model_name=model_name)
    assert what in raised.value.screen()
    assert raised.value.hint is not None
    assert "pip install timm" in raised.value.hint


def test_the_extra_brings_timm() -> None:
    """A bare name of timm's becomes timm:NAME."""
    assert check_request(recipe="shapes-cnn", model_name="resnet50d").about["model_name"] == "timm:resnet50d"


def test_parameters_become_settings_and_the_rest_is_the_recipes() -> None:
    request = check_request(recipe="shapes-cnn", batch_size=128, learning_rate=0.3, flags="--optimizer adamw")
    for line in ("global_batch_size: 128", "base_lr: 0.3", "optimizer: 'adamw'", "epochs: 10"):
        assert line in request.recipe.splitlines()
    assert request.about["epochs"] == 10


def test_a_default_tracker_that_is_missing_does_not_count_as_chosen_on_the_nodes(tmp_path: Path) -> None:
    """The request carries which settings are defaults: a node leaves out a default that it cannot have."""
    assert importlib.util.find_spec("tensorboard") is None  # .venv-flows is a plain install
    for flags, origin in (("", "default"), ("--track", "file")):
        (tmp_path / "sent.yaml").write_text(check_request(recipe="shapes-cnn", flags=flags).recipe)
        loaded = load_config(str(tmp_path / "sent.yaml"), [])
        assert loaded.origin("track") == origin
        check_loaded(loaded)


def test_a_gang_starts_again_by_metaflow_and_a_lone_node_by_itself() -> None:
    assert check_request(recipe="shapes-cnn", cluster_size=2).max_restarts == 0
    assert check_request(recipe="shapes-cnn", cluster_size=1).max_restarts == 3
    assert check_request(recipe="shapes-cnn", cluster_size=2, flags="--max-restarts 1").max_restarts == 1


# --- The gang


def places(name: str, count: int) -> list[Place]:
    return [Place(count, own, "127.0.0.1", name, SECRET) for own in range(count)]


def meet_all(name: str, count: int) -> list[Gang]:
    """All nodes in this process, each in a thread."""
    gangs: dict[int, Gang] = {}

    def join(place: Place) -> None:
        gangs[place.own] = meet(place, {"cores": 1}, lambda layout: {"of": len(layout)}, timeout_s=20)

    threads = [threading.Thread(target=join, args=(place,)) for place in places(name, count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [gangs[own] for own in range(count)]


def wait_for_loss(gang: Gang) -> str:
    deadline = time.monotonic() + 20
    while gang.lost is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return gang.lost


def test_all_nodes_follow_the_main_ones_plan(tmp_path: Path) -> None:
    gangs = meet_all(str(tmp_path), 3)
    assert [gang.plan for gang in gangs] == [{"of": 3}] * 3
    assert [node["node"] for node in gangs[2].layout] == [0, 1, 2]
    heard: list[Message] = []
    is_heard = threading.Event()
    gangs[1].on_news = lambda message: (heard.append(message), is_heard.set())[0]
    gangs[0].tell({"key": "k"})
    assert is_heard.wait(20)
    assert heard == [{"key": "k"}]
    for gang in gangs:
        gang.leave(0)
    for gang in gangs:
        gang.wait_for_others(20)
    assert [gang.lost for gang in gangs] == [None] * 3


def test_a_node_that_fails_is_heard_of(tmp_path: Path) -> None:
    gangs = meet_all(str(tmp_path), 2)
    gangs[1].leave(70)
    assert wait_for_loss(gangs[0]) == "node 1 ended with exit code 70"
    gangs[0].leave(70)


def test_a_killed_node_is_heard_of_at_once(tmp_path: Path) -> None:
    main, other = places(str(tmp_path), 2)
    place = f"Place(2, 1, {other.main_host!r}, {other.name!r}, {SECRET!r})"
    code = f"from {Place.__module__} import *; meet({place}, {{}}, dict, 20); print('here', flush=True); input()"
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        gang = meet(main, {}, lambda layout: {}, timeout_s=20)
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.kill()
        killed_at = time.monotonic()
        assert wait_for_loss(gang).startswith("node 1 on ")
        assert time.monotonic() - killed_at < 2
        gang.leave(70)


def test_a_missing_node_is_named(tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match="1 of 2 nodes did not arrive within 0 s") as raised:
        meet(places(str(tmp_path), 2)[0], {}, lambda layout: {}, timeout_s=0.3)
    assert "missing: node 1" in raised.value.screen()


def test_a_missing_main_node_is_named(tmp_path: Path) -> None:
    with pytest.raises(PacelineError, match="the main node did not answer"):
        meet(places(str(tmp_path), 2)[1], {}, lambda layout: {}, timeout_s=0.3)


def test_strangers_on_the_first_port_are_passed_over(tmp_path: Path) -> None:
    with socket.create_server(("", places(str(tmp_path), 2)[0].ports()[0])):
        gangs = meet_all(str(tmp_path), 2)
    assert gangs[1].plan == {"of": 2}
    for gang in gangs:
        gang.leave(0)


def test_strangers_do_not_take_a_place(tmp_path: Path) -> None:
    """SECURITY.md: a node without the secret is not heard; silent connections hold up nobody."""
    main, other = places(str(tmp_path), 2)
    gangs: list[Gang] = []
    thread = threading.Thread(target=lambda: gangs.append(meet(main, {}, lambda layout: {"of": 2}, 20)))
    thread.start()
    port = knock(main)
    with ExitStack() as stack:
        for _ in range(20):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        for words in (b'{"gang": "x", "node": 1}\n', b"x" * (1 << 20)):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            with suppress(ConnectionError):
                stranger.sendall(words)
                assert stranger.recv(10) == b""
        for hello in ({"node": 2, "host": "a"}, {"node": "1", "host": "a"}, {"node": 1}, {"node": 1, "host": 3}, {}):
            peer = connect("127.0.0.1", port, SECRET, main.context)
            peer.send(hello)
            assert peer.receive() is None
            peer.close()
        gangs.append(meet(other, {}, lambda layout: {}, timeout_s=20))
        thread.join(20)
    assert [gang.plan for gang in gangs] == [{"of": 2}] * 2
    for gang in gangs:
        gang.leave(0)
    for gang in gangs:
        gang.wait_for_others(20)


def knock(main: Place) -> int:
    """The port at which the main node listens: there, another secret is refused."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        for port in main.ports():
            try:
                connect("127.0.0.1", port, create_secret().encode(), main.context)
            except NotProved:
                return port
            except OSError:
                continue
    raise AssertionError("nobody listens")


def test_a_malformed_goodbye_is_dropped(tmp_path: Path) -> None:
    """A message that cannot be read changes nothing; the connection goes on."""
    gangs = meet_all(str(tmp_path), 2)
    for message in ({"bye": "x"}, {"bye": None}, {"bye": 10**9}):
        gangs[1].tell(message)
    gangs[1].leave(70)
    assert wait_for_loss(gangs[0]) == "node 1 ended with exit code 70"
    gangs[0].leave(70)


@pytest.mark.parametrize(
    "answer",
    [{}, {"layout": [], "plan": {}}, {"layout": [{"node": 0, "host": "a"}] * 2, "plan": {}}, {"layout": 3, "plan": {}}],
)
def test_an_answer_that_cannot_be_read_is_our_own_error(answer: dict[str, Any]) -> None:
    """A malformed answer of the main node is our own error, not a KeyError."""
    with pytest.raises(MalformedMessage):
        read_answer(answer, 2)


def test_the_secret_travels_with_the_request_and_is_not_printed() -> None:
    """Each flow has its own; neither the request nor a node's place shows it."""
    first, second = check_request(recipe="shapes-cnn"), check_request(recipe="shapes-cnn")
    assert first.secret != second.secret
    assert first.secret not in repr(first)
    assert SECRET.decode() not in repr(places("x", 1)[0])


# --- Checkpoints on their way, through a stand-in for the datastore


class FolderStore:
    """Stands in for `current.checkpoint`: parcels in folders, loaded as links, as Metaflow's local datastore does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.saved: list[dict[str, Any]] = []

    def save(self, path: str, *, name: str, metadata: dict[str, Any], latest: bool) -> dict[str, Any]:
        key = f"{name}-{len(self.saved)}"
        shutil.copytree(path, self.path / key)
        self.saved.append({"key": key, "metadata": metadata, "latest": latest})
        return self.saved[-1]

    def load(self, reference: str, path: str) -> None:
        for file in (self.path / reference).rglob("*"):
            target = Path(path) / file.relative_to(self.path / reference)
            if file.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(file)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with three checkpoints, one of which is the best."""
    path = tmp_path_factory.mktemp("trained")
    flags = ["--num-samples=200", "--epochs=3", "--hidden-size=8", "--processes=1", "--keep-last=3"]
    answer = paceline("train", "synthetic-mlp", "--global-batch-size=32", *flags, "--output-dir=run", cwd=path)
    assert answer.code == 0, answer
    return path / "run"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> RunFolder:
    shutil.copytree(trained, tmp_path / "run", symlinks=True)
    return RunFolder(tmp_path / "run")


def courier_of(run: RunFolder, tmp_path: Path, *, best_is_latest: bool = False) -> Courier:
    return Courier(run, FolderStore(tmp_path / "store"), {"recipe": "x"}, best_is_latest)


def test_best_and_newest_travel_once_through_a_fake_datastore(run: RunFolder, tmp_path: Path) -> None:
    newest, older = step_folders(run.checkpoints)[:2]
    (run.checkpoints / "best").unlink()
    (run.checkpoints / "best").symlink_to(older.name)
    courier = courier_of(run, tmp_path)
    courier.look()
    courier.finish()
    best, last = courier.datastore.saved  # type: ignore[attr-defined]
    assert (best["metadata"]["is_best"], last["metadata"]["is_best"]) == (True, False)
    assert last["metadata"]["best_key"] == best["key"]
    assert last["metadata"]["step"] == int(newest.name.removeprefix("step-"))
    assert last["metadata"]["val_loss"] > 0
    arrived = RunFolder(tmp_path / "elsewhere")
    receiver = Courier(arrived, courier.datastore, {})
    assert receiver.fetch([last["key"], best["key"]]) == [newest.name, older.name]
    receiver.look()
    assert len(courier.datastore.saved) == 2  # what came from there is not sent back  # type: ignore[attr-defined]
    assert {path.name for path in step_folders(arrived.checkpoints)} == {newest.name, older.name}
    for path in step_folders(arrived.checkpoints):
        verify(path)  # plain files: it refuses links
    assert not arrived.metrics_jsonl.is_symlink()
    assert arrived.metrics_jsonl.read_bytes() == run.metrics_jsonl.read_bytes()


def test_only_the_best_is_latest_if_so_asked_through_a_fake_datastore(run: RunFolder, tmp_path: Path) -> None:
    (run.checkpoints / "best").unlink()
    (run.checkpoints / "best").symlink_to(step_folders(run.checkpoints)[1].name)
    courier = courier_of(run, tmp_path, best_is_latest=True)
    courier.look()
    assert [entry["latest"] for entry in courier.datastore.saved] == [True, False]  # type: ignore[attr-defined]


def test_a_damaged_checkpoint_stays_at_home(run: RunFolder, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (run.checkpoints / "best").unlink()
    flip_a_bit(run.checkpoints)
    courier = courier_of(run, tmp_path)
    courier.start()
    courier.finish()
    assert courier.datastore.saved == []  # type: ignore[attr-defined]
    assert "did not reach the datastore" in caplog.text


def test_a_parcel_that_was_damaged_on_the_way_is_refused(run: RunFolder, tmp_path: Path) -> None:
    courier = courier_of(run, tmp_path)
    courier.look()
    key = courier.datastore.saved[-1]["key"]  # type: ignore[attr-defined]
    flip_a_bit(tmp_path / "store" / key / "checkpoints")
    arrived = RunFolder(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="damaged"):
        Courier(arrived, courier.datastore, {}).fetch([key])
    assert step_folders(arrived.checkpoints) == []


def test_the_history_of_the_newest_checkpoint_replaces_half_of_one(run: RunFolder, tmp_path: Path) -> None:
    """Whatever the order of parcels, and after an interrupted fetch. A fake datastore."""
    newest, older = step_folders(run.checkpoints)[:2]
    rows = run.metrics_jsonl.read_text()
    (run.checkpoints / "best").unlink()
    (run.checkpoints / "best").symlink_to(older.name)
    courier = courier_of(run, tmp_path)
    courier.look()
    best, last = (entry["key"] for entry in courier.datastore.saved)  # type: ignore[attr-defined]
    (tmp_path / "store" / best / "metrics.jsonl").write_text("rows up to the best\n")
    for number, keys in enumerate(([best, last], [last, best])):
        arrived = RunFolder(tmp_path / f"elsewhere-{number}")
        arrived.create()
        arrived.metrics_jsonl.write_text(rows[: len(rows) // 2])
        Courier(arrived, courier.datastore, {}).fetch(keys)
        assert arrived.metrics_jsonl.read_text() == rows
        assert {path.name for path in step_folders(arrived.checkpoints)} == {newest.name, older.name}


def test_a_step_that_was_saved_anew_replaces_the_one_that_is_here(run: RunFolder, tmp_path: Path) -> None:
    """A run that went back saves a step again, with other weights: the other nodes get these. A fake datastore."""
    newest = step_folders(run.checkpoints)[0]
    courier = courier_of(run, tmp_path)
    courier.look()
    key = courier.datastore.saved[-1]["key"]  # type: ignore[attr-defined]
    arrived = RunFolder(tmp_path / "elsewhere")
    arrived.create()
    stale = arrived.checkpoints / newest.name
    shutil.copytree(step_folders(run.checkpoints)[1], stale)
    Courier(arrived, courier.datastore, {}).fetch([key])
    assert (stale / "manifest.json").read_bytes() == (newest / "manifest.json").read_bytes()


def test_a_step_that_was_saved_anew_is_sent_anew_through_a_fake_datastore(run: RunFolder, tmp_path: Path) -> None:
    courier = courier_of(run, tmp_path)
    courier.look()
    count = len(courier.datastore.saved)  # type: ignore[attr-defined]
    newest, older = step_folders(run.checkpoints)[:2]
    shutil.rmtree(newest)
    shutil.copytree(older, newest)
    courier.look()
    assert len(courier.datastore.saved) > count  # type: ignore[attr-defined]


def test_a_store_that_fails_does_not_end_training_and_is_tried_again(run: RunFolder, tmp_path: Path) -> None:
    class Stumbling(FolderStore):
        failures = 2

        def save(self, path: str, **said: Any) -> dict[str, Any]:
            if self.failures:
                self.failures -= 1
                raise ConnectionError("no route")
            return super().save(path, **said)

    courier = Courier(run, Stumbling(tmp_path / "store"), {})
    courier.start()
    courier.look()
    assert "no route" in courier.problem
    courier.look()
    courier.finish()
    courier.look()
    assert courier.problem == ""
    assert courier.datastore.saved != []  # type: ignore[attr-defined]


# --- What a task goes on from


def parcel(step: int, run: int, *, is_best: bool = False, best_key: str = "", **about: Any) -> dict[str, Any]:
    said = {**json.loads(json.dumps(check_request(recipe="shapes-cnn").about)), **about}
    return {
        "key": f"key-{step}",
        "pathspec": f"F/{run}/train/2",
        "attempt": 0,
        "created_on": f"2026-01-{run:02}T{step:02}:00:00",
        "metadata": {**said, "step": step, "is_best": is_best, "best_key": best_key},
    }


OWN = parcel(9, 3, best_key="key-5")
ORIGIN = StartPoint("key-7", "key-6", 7, "F/2/train/2", 0)
EARLIER = StartPoint("key-8", "key-4", 8, "F/1/train/2", 0)


@pytest.mark.parametrize(
    ("policy", "has_own", "is_resumed", "keys"),
    [
        ("fresh", False, False, []),
        ("fresh", True, False, ["key-9", "key-5"]),
        ("fresh", False, True, ["key-7", "key-6"]),
        ("fresh", True, True, ["key-9", "key-5"]),
        ("eager", False, False, ["key-8", "key-4"]),
        ("eager", True, False, ["key-9", "key-5"]),
        ("eager", False, True, ["key-7", "key-6"]),
        ("none", True, True, []),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what Metaflow imports
def test_load_policies_with_a_fake_datastore(
    policy: str, has_own: bool, is_resumed: bool, keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own attempts first, then the run that is resumed, then what eager has found in start."""
    from paceline.integrations.metaflow import steps

    store = SimpleNamespace(is_loaded=has_own, info=SimpleNamespace(to_dict=lambda: OWN))
    current = SimpleNamespace(checkpoint=store, origin_run_id="2" if is_resumed else None, flow_name="F", step_name="s")
    monkeypatch.setattr(steps, "current", current)
    monkeypatch.setattr(steps, "newest_of_origin", lambda *given: (ORIGIN, ""))
    request = check_request(recipe="shapes-cnn", load_policy=policy)
    request = dataclasses.replace(request, earlier=EARLIER if policy == "eager" else None)
    assert steps.tell_start(request)[0] == keys


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_only_a_checkpoint_of_the_same_recipe_and_identity_is_chosen() -> None:
    """The newest of another recipe, of other settings or without any is passed over, and the newest one is named."""
    from paceline.integrations.metaflow.earlier import choose

    identity = check_request(recipe="shapes-cnn").about["identity"]
    own = [parcel(2, 1, is_best=True), parcel(4, 1, best_key="key-2")]
    others = [
        parcel(6, 2, recipe="synthetic-mlp"),
        parcel(7, 3, identity={**identity, "seed": 7}),
        parcel(8, 4, identity={**identity, "dataset": "cifar10"}),
    ]
    unknown = parcel(9, 5)
    del unknown["metadata"]["identity"]
    request = check_request(recipe="shapes-cnn", epochs=30, learning_rate=0.3)  # these may change
    assert choose(request, [*own, *others, unknown])[0] == StartPoint("key-4", "key-2", 4, "F/1/train/2", 0)
    best_first = check_request(recipe="shapes-cnn", best_is_latest=True)
    assert choose(best_first, [*others, *own])[0] == StartPoint("key-2", "", 2, "F/1/train/2", 0)
    assert choose(request, others[:2]) == (None, "F/3 is another run: seed 7, now 42")
    assert choose(request, others[:1]) == (None, "F/2 is another run: recipe 'synthetic-mlp', now 'shapes-cnn'")
    assert choose(request, []) == (None, "")


# --- The guard of a child


def test_a_guarded_command_ends_with_its_parent(tmp_path: Path) -> None:
    guard = [sys.executable, "-m", "paceline.launch.child_guard"]
    child = "import time, sys; print('up', flush=True); time.sleep(600)"
    words = [*guard, sys.executable, "-c", child]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "up\n"
        process.stdin.close()
        assert process.wait(20) == 128 + 15
        assert process.stdout.read() == ""  # nobody is left who could write


def test_a_guard_passes_on_the_exit_code() -> None:
    guard = [sys.executable, "-m", "paceline.launch.child_guard"]
    words = [*guard, sys.executable, "-c", "import sys; sys.exit(75)"]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as process:
        assert process.wait(20) == 75


def test_a_guard_hides_a_folder_that_will_be_gone(tmp_path: Path) -> None:
    """On both streams, the run folder by its name and the rest by its path within; other bytes stay as they are."""
    script = (
        "import sys\n"
        f"print('saved in {tmp_path}/run/checkpoints')\n"
        f"sys.stderr.write('where: {tmp_path}/tiny.yaml, line 3')\n"
        "sys.stdout.flush()\n"
        "sys.stdout.buffer.write(bytes([255, 10]))\n"
    )
    guard = [sys.executable, "-m", "paceline.launch.child_guard", "--hide", str(tmp_path)]
    words, pipe = [*guard, sys.executable, "-c", script], subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.wait(20) == 0
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read() == b"saved in the run folder/checkpoints\n\xff\n"
        assert process.stderr.read() == b"where: tiny.yaml, line 3"
