"""One node's part in a training step: meet the others, start this node's ranks, see them through. No torch.

Every node runs one `paceline train` that starts its ranks and watches them, as one agent per node does under Slurm.
The node of rank 0 sends checkpoints to the datastore; where nodes have disks of their
own, the others fetch them there.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from uuid import uuid4

from paceline.errors import EXIT_INTERNAL, UserError
from paceline.integrations.metaflow.courier import Courier, Datastore, Parcel
from paceline.integrations.metaflow.gang import Gang, Place, free_port, meet
from paceline.integrations.metaflow.request import Request
from paceline.launch.child import Child, start_child
from paceline.launch.child_guard import without_folder
from paceline.metrics.screen import BRIEF, OUTPUT
from paceline.runs.folder import TEMPORARY, RunFolder
from paceline.runs.shared_token import NODE_LOCAL
from paceline.runtime.cores import usable_cores
from paceline.runtime.detect import Nodes, agent_variables, count_gpus
from paceline.runtime.peers import Message
from paceline.runtime.secret import RUN_SECRET
from paceline.settings.schema import ParallelConfig

_LOOK_S = 0.1
_LOST_GRACE_S = 10.0  # the ranks notice a lost peer by themselves, and have more to say about it
_MARK = "shared.mark"


@dataclass
class Node:
    """A node that has met the others and knows what to do."""

    request: Request
    place: Place
    gang: Gang
    folder: RunFolder
    courier: Courier
    attempt: int
    has_shared_disk: bool  # with the main node
    strikes_faults: bool  # a rehearsed fault belongs to the first attempt of the first run

    @property
    def origin(self) -> str:
        """Where the gang goes on from, in words."""
        return str(self.gang.plan["origin"])

    @property
    def owns_folder(self) -> bool:
        """Whether what is in the run folder is this node's to send, show and remove."""
        return self.place.is_main or not self.has_shared_disk

    @property
    def has_results(self) -> bool:
        """Whether rank 0 trained to the end, on the disk that is ours."""
        return self.owns_folder and self.folder.results.exists()

    def train(self) -> int:
        """Start the ranks of this node and wait; returns paceline's exit code."""
        if self.owns_folder:
            self.courier.start()
        code = EXIT_INTERNAL
        try:
            code = self._run()
        finally:
            self.courier.finish()
            self.gang.leave(code)
        return code

    def close(self) -> None:
        """The main node's copy goes last: on a laptop it is everybody's."""
        if self.place.is_main:
            self.gang.wait_for_others(_LOST_GRACE_S)
        if self.owns_folder:
            shutil.rmtree(self.folder.path.parent, ignore_errors=True)

    def _run(self) -> int:
        hidden = self.folder.path.parent
        with start_child(self._arguments(), hidden_folder=hidden, environment=self._environment()) as child:
            with _stop_signals_to(child):
                self._wait(child)
            return child.wait()

    def _wait(self, child: Child) -> None:
        lost_at = 0.0
        while child.is_running:
            if self.gang.lost is not None:
                lost_at = lost_at or time.monotonic()
                if time.monotonic() - lost_at > _LOST_GRACE_S:
                    print(f"{self.gang.lost}: this node's ranks are ended", file=sys.stderr, flush=True)
                    child.stop_as_if_abandoned()
                    return
            with suppress(subprocess.TimeoutExpired):
                child.wait(_LOOK_S)

    def _arguments(self) -> list[str]:
        recipe = self.folder.path.parent / f"{self.request.name}.yaml"
        recipe.write_text(self.request.recipe)
        flags = ["--processes", str(self.request.processes_per_node), "--output-dir", str(self.folder.path)]
        flags += ["--resume", "auto", "--max-restarts", str(self.request.max_restarts)]
        if self.request.best_is_latest:
            flags.append("--best-is-latest")
        if self.place.nodes > 1:
            flags += ["--stop-signals", "SIGTERM"]  # the others are Slurm's, which is not here
        if self.request.shares_cores:
            flags += ["--omp-num-threads", str(self._threads())]
        if self.gang.plan["device"]:
            flags += ["--device", self.gang.plan["device"]]
        if not self.strikes_faults:
            flags += ["--inject="]
        return ["train", str(recipe), *flags]

    def _threads(self) -> int:
        ranks_here = self.request.processes_per_node * len(_neighbours(self.gang.layout, self.place.own))
        return max(1, usable_cores() // ranks_here)

    def _environment(self) -> dict[str, str]:
        environment = {OUTPUT: BRIEF, **os.environ, TEMPORARY: "1"}
        if self.place.nodes > 1:
            place, port = self.place, int(self.gang.plan["port"])
            environment.update(agent_variables(Nodes(place.nodes, place.own, place.main_host, port)))
            environment[RUN_SECRET] = place.secret.decode()
        if not self.has_shared_disk:
            environment[NODE_LOCAL] = "1"  # the datastore brings this node its checkpoints
        gpus = self.gang.plan["gpus"].get(str(self.place.own))
        if gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpus
        return environment

    def hear(self, message: Message) -> None:
        """What other ranks have saved, ours may be asked for; only a shared disk has it already."""
        if self.has_shared_disk and not self.place.is_main:
            return
        try:
            self.courier.follow(Parcel(**message))
        except Exception as error:  # not in time for this attempt, then: the next one starts with all of it
            words = without_folder(f"{type(error).__name__}: {error}", self.folder.path.parent)
            print(f"warning: a checkpoint did not arrive: {words}", file=sys.stderr, flush=True)


def join(
    request: Request,
    place: Place,
    datastore: Datastore,
    attempt: int,
    keys: list[str],
    origin: str = "",
    *,
    is_resumed: bool = False,
) -> Node:
    """Meet the other nodes. `keys` are the parcels to go on from, as the main node sees them; `origin` in words."""

    def make_courier(folder: RunFolder) -> Courier:
        return Courier(folder, datastore, request.about, request.best_is_latest)

    prepared: list[Courier] = []

    def make_plan(layout: list[Message]) -> Message:
        """On the main node: its folder is ready before the others hear of it, which may see the same disk."""
        courier = make_courier(_make_folder(request.work_dir))
        prepared.append(courier)
        courier.fetch(keys)
        mark = uuid4().hex
        (courier.folder.path / _MARK).write_text(mark)
        device, gpus = _share_gpus(request, layout)
        places = {"folder": str(courier.folder.path), "mark": mark, "port": free_port() if place.nodes > 1 else 0}
        return {**places, "keys": keys, "origin": origin, "device": device, "gpus": gpus}

    about = {"host": socket.gethostname(), "machine": _machine(), "cores": usable_cores(), "pid": os.getpid()}
    gang = meet(place, about, make_plan, request.node_timeout_s)
    folder = RunFolder(Path(gang.plan["folder"]))
    courier = prepared[0] if prepared else make_courier(folder)
    has_shared_disk = _sees_mark(folder, gang.plan["mark"])
    if not has_shared_disk:
        _refuse_shards(request, place)
        print(f"node {place.own} has a disk of its own: checkpoints come from the datastore", flush=True)
        courier.fetch(gang.plan["keys"])
    strikes_faults = attempt == 0 and not is_resumed
    node = Node(request, place, gang, folder, courier, attempt, has_shared_disk, strikes_faults)
    courier.on_sent = lambda parcel: gang.tell(asdict(parcel))
    gang.on_news = node.hear
    return node


def _refuse_shards(request: Request, place: Place) -> None:
    if request.is_sharded:
        raise UserError(
            "strategy fsdp on several nodes needs a disk that all of them share",
            where=f"node {place.own}",
            got=request.work_dir or "a temporary folder of the main node",
            hint="--work-dir PATH on shared storage, or another --strategy",
        )


def _make_folder(work_dir: str) -> RunFolder:
    if work_dir:
        Path(work_dir).mkdir(parents=True, exist_ok=True)
    base = tempfile.mkdtemp(prefix="paceline-flow-", dir=work_dir or None)
    folder = RunFolder(Path(base).resolve() / "run")
    folder.create()
    return folder


def _sees_mark(folder: RunFolder, mark: str) -> bool:
    try:
        return (folder.path / _MARK).read_text() == mark
    except OSError:
        return False


def _machine() -> str:
    """Two containers on one machine have names of their own, and cores of their own."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + socket.gethostname()
    return socket.gethostname()


def _neighbours(layout: list[Message], own: int) -> list[int]:
    """The nodes that share a machine with this one, itself included: on a laptop, all."""
    return [node["node"] for node in layout if node["machine"] == layout[own]["machine"]]


def _share_gpus(request: Request, layout: list[Message]) -> tuple[str, dict[str, str]]:
    """On one machine every node sees every GPU: give each node its own, or leave them alone if there are too few."""
    neighbours = _neighbours(layout, 0)
    if len(neighbours) == 1 or request.chose_device or shutil.which("nvidia-smi") is None:
        return "", {}
    each = request.processes_per_node
    gpus = count_gpus(ParallelConfig())
    if gpus == 0:
        return "", {}
    if gpus < each * len(neighbours):
        print(f"note: {gpus} GPUs for {each * len(neighbours)} ranks on this machine: training on the CPU", flush=True)
        return "cpu", {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    return "", {str(node): ",".join(visible[n * each : (n + 1) * each]) for n, node in enumerate(neighbours)}


@contextmanager
def _stop_signals_to(child: Child) -> Iterator[None]:
    """A stop request to this task is one to its ranks, which save; the task lives to send that checkpoint off."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        child.send_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
