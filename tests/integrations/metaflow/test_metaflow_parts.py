"""The parts of the Metaflow integration: parameters, the gang of nodes, uploads and fetches."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from harness.cli import paceline
from paceline.checkpoints import uploader as uploader_module
from paceline.checkpoints.format import step_folders, verify
from paceline.checkpoints.uploader import CheckpointUploader
from paceline.errors import CheckpointError, PacelineError, UserError
from paceline.integrations.metaflow.datastore import MetaflowDatastore
from paceline.integrations.metaflow.node import NodePlan, member_of
from paceline.integrations.metaflow.request import StartPoint, check_request
from paceline.launch.gang import Gang, GangMember
from paceline.launch.gang_messages import Ended, Hello, Outcome, Start, Upload, build, encode
from paceline.launch.request import check_loaded
from paceline.runs.folder import RunFolder
from paceline.runtime.peers import MalformedMessage, connect
from paceline.runtime.secret import NotProved, create_secret
from paceline.settings.extras import how_to_install
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
        ({"flags": "--processes 2"}, "the flow sets it", "--processes-per-node"),
        ({"flags": "--resume auto"}, "the flow sets it", "--load-policy"),
        ({"flags": "--output-dir here"}, "the flow sets it", "--work-dir"),
        ({"flags": "--inject 'kil step=3'"}, "", "kill"),
        ({"flags": "--optimizer 'adam"}, "cannot be read", "--flags"),
        ({"flags": "--track mlflow"}, "mlflow is not installed", "flag --track"),
        ({"flags": "adam"}, "unexpected argument", "which start with"),
        ({"flags": "--strategy single", "cluster_size": 2}, "one process", "--cluster-size 1"),
        ({"cluster_size": 0}, "cluster-size", "from 1"),
        ({"cluster_size": 5000}, "cluster-size", "1024"),
        ({"processes_per_node": -1}, "processes-per-node", "from 1"),
        ({"load_policy": "lazy"}, "load policy", "fresh"),
        ({"node_timeout_s": 0.0}, "node-timeout-s", "more than 0"),
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
def test_without_timm_its_models_are_refused_with_the_install_command(
    model_name: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extra includes timm. An installation without the extra may lack it."""
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UserError) as raised:
        check_request(recipe="shapes-cnn", model_name=model_name)
    assert what in raised.value.screen()
    assert raised.value.hint is not None
    assert raised.value.hint == how_to_install("timm")


def test_the_extra_includes_timm() -> None:
    """A plain model name of timm becomes timm:NAME."""
    assert check_request(recipe="shapes-cnn", model_name="resnet50d").about["model_name"] == "timm:resnet50d"


def test_parameters_become_settings_and_the_recipe_sets_the_rest() -> None:
    request = check_request(recipe="shapes-cnn", batch_size=128, learning_rate=0.3, flags="--optimizer adamw")
    for line in ("global_batch_size: 128", "base_lr: 0.3", "optimizer: 'adamw'", "epochs: 10"):
        assert line in request.recipe.splitlines()
    assert request.about["epochs"] == 10


def test_a_missing_default_tracker_does_not_count_as_chosen_on_the_nodes(tmp_path: Path) -> None:
    """The request records which settings are defaults. A node skips a default that is not installed."""
    assert importlib.util.find_spec("tensorboard") is None  # .venv-flows is a plain install
    for flags, origin in (("", "default"), ("--track", "file")):
        (tmp_path / "sent.yaml").write_text(check_request(recipe="shapes-cnn", flags=flags).recipe)
        loaded = load_config(str(tmp_path / "sent.yaml"), [])
        assert loaded.origin("track") == origin
        check_loaded(loaded)


def test_metaflow_restarts_a_gang_and_a_single_node_restarts_itself() -> None:
    assert check_request(recipe="shapes-cnn", cluster_size=2).max_restarts == 0
    assert check_request(recipe="shapes-cnn", cluster_size=1).max_restarts == 3
    assert check_request(recipe="shapes-cnn", cluster_size=2, flags="--max-restarts 1").max_restarts == 1


# --- The gang


def members(name: str, count: int, timeout_s: float = 20) -> list[GangMember]:
    return [
        member_of(name, node=node, nodes=count, host="127.0.0.1", timeout_s=timeout_s, secret=SECRET)
        for node in range(count)
    ]


def meet(member: GangMember) -> tuple[Gang, Start]:
    gang = Gang(member)
    try:
        start = gang.join(make_plan=lambda nodes: (1, {"of": len(nodes)}))
    finally:
        gang.close()
    assert start is not None
    return gang, start


def meet_all(name: str, count: int) -> tuple[list[Gang], list[Start]]:
    """All nodes in this process, each in a thread."""
    with ThreadPoolExecutor(count) as pool:
        met = list(pool.map(meet, members(name, count)))
    return [gang for gang, _ in met], [start for _, start in met]


def disconnect(gangs: list[Gang]) -> None:
    for gang in gangs:
        gang.disconnect()


def test_all_nodes_get_the_plan_of_the_leader(tmp_path: Path) -> None:
    gangs, starts = meet_all(str(tmp_path), 3)
    assert [start.plan for start in starts] == [{"of": 3}] * 3
    assert [node.node for node in starts[2].nodes] == [0, 1, 2]
    gangs[0].send_upload(Upload("k", ""))
    assert [gang.uploads.get(timeout=20) for gang in gangs[1:]] == [Upload("k", "")] * 2
    for gang in gangs:
        gang.report_end(0)
    assert {gang.wait_for_outcome() for gang in gangs} == {Outcome("end", 0, -1, "all nodes have finished")}
    disconnect(gangs)


@pytest.mark.parametrize("failed", [0, 1])
def test_a_failed_node_ends_the_gang(failed: int, tmp_path: Path) -> None:
    gangs, _ = meet_all(str(tmp_path), 2)
    gangs[failed].report_end(70)
    outcomes = [gang.wait_for_outcome() for gang in gangs]
    assert [(outcome.action, outcome.code, outcome.node) for outcome in outcomes] == [("replace", 70, failed)] * 2
    disconnect(gangs)


def test_a_killed_node_is_lost_at_once(tmp_path: Path) -> None:
    leader, _ = members(str(tmp_path), 2)
    code = (
        "from paceline.integrations.metaflow.node import *\n"
        f"member = member_of({str(tmp_path)!r}, node=1, nodes=2, host='127.0.0.1', timeout_s=20, secret={SECRET!r})\n"
        "Gang(member).join(); print('here', flush=True); input()"
    )
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        gang, _ = meet(leader)
        assert process.stdout is not None
        assert process.stdout.readline() == "here\n"
        process.kill()
        killed_at_s = time.monotonic()
        outcome = gang.wait_for_outcome()
        assert (outcome.action, outcome.node) == ("restart", 1)
        assert time.monotonic() - killed_at_s < 2
        gang.disconnect()


def test_a_missing_node_is_named(tmp_path: Path) -> None:
    with pytest.raises(PacelineError) as raised:
        meet(members(str(tmp_path), 2, timeout_s=0.3)[0])
    assert raised.value.got == "missing: node 1"


def test_a_missing_leader_is_named(tmp_path: Path) -> None:
    with pytest.raises(PacelineError) as raised:
        meet(members(str(tmp_path), 2, timeout_s=0.3)[1])
    assert str(raised.value.where).startswith("127.0.0.1:")


def test_a_node_that_leaves_before_all_have_arrived_ends_the_step(tmp_path: Path) -> None:
    """It returns only in the next attempt, so the others do not wait for the deadline."""
    leader, other, _ = members(str(tmp_path), 3, timeout_s=60)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(meet, leader)
        peer = connect("127.0.0.1", port_of_leader(leader), SECRET, other.context)
        peer.send(encode(Hello(1, "host-1", "machine", 1, 0)))
        peer.close()
        with pytest.raises(PacelineError) as raised:
            waiting.result(20)
    assert raised.value.got == "host-1"


def test_a_port_that_another_program_uses_is_skipped(tmp_path: Path) -> None:
    with socket.create_server(("", members(str(tmp_path), 2)[0].ports[0])):
        gangs, starts = meet_all(str(tmp_path), 2)
    assert starts[1].plan == {"of": 2}
    disconnect(gangs)


def test_connections_without_the_secret_do_not_disturb(tmp_path: Path) -> None:
    """SECURITY.md: messages without the secret are not read, and silent connections delay no node."""
    leader, other = members(str(tmp_path), 2)
    hello = encode(Hello(1, "a", "a", 1, 0))
    wrong: tuple[dict[str, Any], ...] = (
        {"node": 2},
        {"node": "1"},
        {"host": 3},
        {"cores": None},
        {"type": "ended"},
        {"type": []},
    )
    with ThreadPoolExecutor() as pool, ExitStack() as stack:
        waiting = pool.submit(meet, leader)
        port = port_of_leader(leader)
        for _ in range(20):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        for text in (json.dumps(hello).encode() + b"\n", b"x" * (1 << 20)):
            foreign = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            with suppress(ConnectionError):
                foreign.sendall(text)
                assert foreign.recv(10) == b""
        for change in wrong:
            peer = connect("127.0.0.1", port, SECRET, leader.context)
            peer.send({**hello, **change})
            assert peer.receive() is None
            peer.close()
        met = [meet(other), waiting.result(20)]
    assert [start.plan for _, start in met] == [{"of": 2}] * 2
    disconnect([gang for gang, _ in met])


def port_of_leader(leader: GangMember) -> int:
    """The port of the leader, which refuses another secret."""
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        for port in leader.ports:
            try:
                connect("127.0.0.1", port, create_secret().encode(), leader.context)
            except NotProved:
                return port
            except OSError:
                continue
    raise AssertionError("the leader does not listen")


def test_malformed_messages_are_dropped(tmp_path: Path) -> None:
    """They change nothing, and the connection stays open."""
    gangs, _ = meet_all(str(tmp_path), 2)
    peer = gangs[1]._peers[0]
    for code in ("x", None, 10**9):
        peer.send({**encode(Ended(0, "")), "code": code})
    gangs[1].report_end(70)
    outcome = gangs[0].wait_for_outcome()
    assert (outcome.code, outcome.node) == (70, 1)
    disconnect(gangs)


PLAN = {"folder": "/a", "mark": "m", "keys": ["k"], "origin": "", "device": "", "gpus": {"0": "0,1"}}


@pytest.mark.parametrize("change", [{"keys": "k"}, {"keys": [1]}, {"gpus": {"0": 1}}, {"folder": None}, {"more": 1}])
def test_a_malformed_plan_is_our_own_error(change: dict[str, Any]) -> None:
    """Not a KeyError or a TypeError."""
    assert build(NodePlan, PLAN).keys == ("k",)
    with pytest.raises(MalformedMessage):
        build(NodePlan, {**PLAN, **change})


def test_the_secret_is_in_the_request_and_is_not_printed() -> None:
    """Each flow has its own secret. The request and the members of a gang do not show it."""
    first, second = check_request(recipe="shapes-cnn"), check_request(recipe="shapes-cnn")
    assert first.secret != second.secret
    assert first.secret not in repr(first)
    assert SECRET.decode() not in repr(members("x", 1)[0])


# --- Uploads and fetches, with a stand-in for the datastore


class FolderStore:
    """Replaces `current.checkpoint`: uploads are folders, loaded as links, as in Metaflow's local datastore."""

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


def store_of(run: RunFolder, tmp_path: Path, *, best_is_latest: bool = False) -> tuple[MetaflowDatastore, FolderStore]:
    saved = FolderStore(tmp_path / "store")
    return MetaflowDatastore(run, saved, {"recipe": "x"}, best_is_latest=best_is_latest), saved


def upload_all(store: MetaflowDatastore, run: RunFolder) -> None:
    CheckpointUploader(run, store).upload_new()


def point_best_at(run: RunFolder, path: Path) -> None:
    (run.checkpoints / "best").unlink()
    (run.checkpoints / "best").symlink_to(path.name)


def test_best_and_newest_are_uploaded_once_to_a_fake_datastore(run: RunFolder, tmp_path: Path) -> None:
    newest, older = step_folders(run.checkpoints)[:2]
    point_best_at(run, older)
    announced: list[Upload] = []
    saved = FolderStore(tmp_path / "store")
    store = MetaflowDatastore(run, saved, {"recipe": "x"}, on_upload=announced.append)
    uploader = CheckpointUploader(run, store)
    uploader.start()
    assert uploader.close()
    best, last = saved.saved
    assert announced == [Upload(best["key"], ""), Upload(last["key"], best["key"])]
    assert (best["metadata"]["is_best"], last["metadata"]["is_best"]) == (True, False)
    assert last["metadata"]["best_key"] == best["key"]
    assert last["metadata"]["step"] == int(newest.name.removeprefix("step-"))
    assert last["metadata"]["val_loss"] > 0
    arrived = RunFolder(tmp_path / "elsewhere")
    receiver = MetaflowDatastore(arrived, saved, {})
    assert receiver.fetch([last["key"], best["key"]]) == [newest.name, older.name]
    upload_all(receiver, arrived)
    assert len(saved.saved) == 2  # fetched checkpoints are not uploaded again
    assert {path.name for path in step_folders(arrived.checkpoints)} == {newest.name, older.name}
    for path in step_folders(arrived.checkpoints):
        verify(path)  # plain files: it refuses links
    assert not arrived.metrics_jsonl.is_symlink()
    assert arrived.metrics_jsonl.read_bytes() == run.metrics_jsonl.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "run", "store"]  # no temporary folder


def test_a_node_with_its_own_disk_gets_the_leaders_checkpoints_from_a_fake_datastore(
    run: RunFolder, tmp_path: Path
) -> None:
    newest, older, oldest = step_folders(run.checkpoints)[:3]
    point_best_at(run, older)
    store, saved = store_of(run, tmp_path)
    upload_all(store, run)
    best, last = (entry["key"] for entry in saved.saved)
    arrived = RunFolder(tmp_path / "elsewhere")
    arrived.create()
    shutil.copytree(oldest, arrived.checkpoints / oldest.name)
    MetaflowDatastore(arrived, saved, {}).replace_by(Upload(last, best))
    assert [path.name for path in step_folders(arrived.checkpoints)] == [newest.name, older.name]


def test_with_best_is_latest_only_the_best_is_uploaded_to_a_fake_datastore(run: RunFolder, tmp_path: Path) -> None:
    point_best_at(run, step_folders(run.checkpoints)[1])
    store, saved = store_of(run, tmp_path, best_is_latest=True)
    upload_all(store, run)
    assert [entry["latest"] for entry in saved.saved] == [True, False]


def test_a_damaged_checkpoint_is_not_uploaded_to_a_fake_datastore(
    run: RunFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.checkpoints / "best").unlink()
    flip_a_bit(run.checkpoints)
    store, saved = store_of(run, tmp_path)
    uploader = CheckpointUploader(run, store)
    uploader.start()
    uploader.close()
    assert saved.saved == []
    assert f"{step_folders(run.checkpoints)[0].name} is damaged" in capsys.readouterr().err


def test_a_damaged_upload_in_a_fake_datastore_is_refused(run: RunFolder, tmp_path: Path) -> None:
    store, saved = store_of(run, tmp_path)
    upload_all(store, run)
    key = saved.saved[-1]["key"]
    flip_a_bit(tmp_path / "store" / key / "checkpoints")
    arrived = RunFolder(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError):
        MetaflowDatastore(arrived, saved, {}).fetch([key])
    assert step_folders(arrived.checkpoints) == []


def test_the_metrics_of_the_newest_checkpoint_replace_incomplete_ones(run: RunFolder, tmp_path: Path) -> None:
    """For any order of uploads, and after an interrupted fetch. A fake datastore."""
    newest, older = step_folders(run.checkpoints)[:2]
    rows = run.metrics_jsonl.read_text()
    point_best_at(run, older)
    store, saved = store_of(run, tmp_path)
    upload_all(store, run)
    best, last = (entry["key"] for entry in saved.saved)
    (tmp_path / "store" / best / "metrics.jsonl").write_text("rows up to the best\n")
    for number, keys in enumerate(([best, last], [last, best])):
        arrived = RunFolder(tmp_path / f"elsewhere-{number}")
        arrived.create()
        arrived.metrics_jsonl.write_text(rows[: len(rows) // 2])
        MetaflowDatastore(arrived, saved, {}).fetch(keys)
        assert arrived.metrics_jsonl.read_text() == rows
        assert {path.name for path in step_folders(arrived.checkpoints)} == {newest.name, older.name}


def test_a_step_that_was_saved_again_replaces_the_local_one(run: RunFolder, tmp_path: Path) -> None:
    """A rewound run saves a step again, with other weights. A fake datastore."""
    newest = step_folders(run.checkpoints)[0]
    store, saved = store_of(run, tmp_path)
    upload_all(store, run)
    arrived = RunFolder(tmp_path / "elsewhere")
    arrived.create()
    stale = arrived.checkpoints / newest.name
    shutil.copytree(step_folders(run.checkpoints)[1], stale)
    MetaflowDatastore(arrived, saved, {}).fetch([saved.saved[-1]["key"]])
    assert (stale / "manifest.json").read_bytes() == (newest / "manifest.json").read_bytes()


def test_a_step_that_was_saved_again_is_uploaded_again_to_a_fake_datastore(run: RunFolder, tmp_path: Path) -> None:
    store, saved = store_of(run, tmp_path)
    uploader = CheckpointUploader(run, store)
    uploader.upload_new()
    count = len(saved.saved)
    newest, older = step_folders(run.checkpoints)[:2]
    shutil.rmtree(newest)
    shutil.copytree(older, newest)
    uploader.upload_new()
    assert len(saved.saved) > count


def test_a_failing_fake_datastore_is_retried(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Failing(FolderStore):
        failures = 2

        def save(self, path: str, **options: Any) -> dict[str, Any]:
            if self.failures:
                self.failures -= 1
                raise ConnectionError(f"no route from {path}")
            return super().save(path, **options)

    monkeypatch.setattr(uploader_module, "_LAST_PAUSE_S", 0.01)
    saved = Failing(tmp_path / "store")
    uploader = CheckpointUploader(run, MetaflowDatastore(run, saved, {}))
    uploader.start()
    assert uploader.close()
    assert saved.saved != []
    assert str(tmp_path) not in capsys.readouterr().err  # the folder is temporary


# --- The checkpoint that a task resumes from


def stored(step: int, run: int, *, is_best: bool = False, best_key: str = "", **about: Any) -> dict[str, Any]:
    said = {**json.loads(json.dumps(check_request(recipe="shapes-cnn").about)), **about}
    return {
        "key": f"key-{step}",
        "pathspec": f"F/{run}/train/2",
        "attempt": 0,
        "created_on": f"2026-01-{run:02}T{step:02}:00:00",
        "metadata": {**said, "step": step, "is_best": is_best, "best_key": best_key},
    }


OWN = stored(9, 3, best_key="key-5")
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
    """First its own attempts, then the resumed run, then the checkpoint that eager has found in start."""
    from paceline.integrations.metaflow import steps

    store = SimpleNamespace(is_loaded=has_own, info=SimpleNamespace(to_dict=lambda: OWN))
    current = SimpleNamespace(checkpoint=store, origin_run_id="2" if is_resumed else None, flow_name="F", step_name="s")
    monkeypatch.setattr(steps, "current", current)
    monkeypatch.setattr(steps, "newest_of_origin", lambda *given: (ORIGIN, ""))
    request = check_request(recipe="shapes-cnn", load_policy=policy)
    request = dataclasses.replace(request, earlier=EARLIER if policy == "eager" else None)
    assert steps.print_start(request)[0] == keys


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_only_a_checkpoint_of_the_same_recipe_and_identity_is_chosen() -> None:
    """A newer checkpoint of another recipe, with other settings or without any is skipped. The newest one is named."""
    from paceline.integrations.metaflow.earlier import choose

    identity = check_request(recipe="shapes-cnn").about["identity"]
    own = [stored(2, 1, is_best=True), stored(4, 1, best_key="key-2")]
    others = [
        stored(6, 2, recipe="synthetic-mlp"),
        stored(7, 3, identity={**identity, "seed": 7}),
        stored(8, 4, identity={**identity, "dataset": "cifar10"}),
    ]
    unknown = stored(9, 5)
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
        assert process.stdout.read() == ""  # no process is left that could write


def test_a_guard_forwards_the_exit_code() -> None:
    guard = [sys.executable, "-m", "paceline.launch.child_guard"]
    words = [*guard, sys.executable, "-c", "import sys; sys.exit(75)"]
    with subprocess.Popen(words, stdin=subprocess.PIPE) as process:
        assert process.wait(20) == 75


def test_a_guard_hides_a_temporary_folder(tmp_path: Path) -> None:
    """On both streams: the run folder is shown by its name, other paths relative to it. Other bytes are unchanged."""
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
