"""One node of a training step: it joins the gang, starts the ranks of this node and waits for them. No torch.

Every node runs one `paceline train`, which starts and watches the ranks of this node, as under Slurm. The leader has
rank 0 and uploads checkpoints to the datastore. Nodes with their own disk fetch them from there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from uuid import uuid4

from paceline.checkpoints.uploader import CheckpointUploader
from paceline.errors import EXIT_INTERNAL, UserError, printable
from paceline.integrations.metaflow.datastore import CurrentCheckpoint, MetaflowDatastore
from paceline.integrations.metaflow.request import Request
from paceline.launch.child import Child, start_child
from paceline.launch.gang import FIRST_PORT, PORTS, Gang, GangMember, free_port
from paceline.launch.gang_messages import Hello, Start, Upload, build
from paceline.metrics.screen import BRIEF, OUTPUT
from paceline.runs.folder import TEMPORARY, RunFolder
from paceline.runs.shared_token import NODE_LOCAL
from paceline.runtime.detect import Nodes, agent_variables, count_gpus
from paceline.runtime.resources import usable_cores
from paceline.runtime.secret import RUN_SECRET
from paceline.settings.schema import ParallelConfig

_POLL_S = 0.1
_LOST_GRACE_S = 10.0  # the ranks notice a lost peer themselves, and their error has more details
_MARK = "shared.mark"
_PORT_CANDIDATES = 8


@dataclass(frozen=True)
class NodePlan:
    """What the leader has decided for all nodes."""

    folder: str  # of the run, on the leader
    mark: str  # content of a file in that folder: a node that reads it there shares the disk
    keys: tuple[str, ...]  # of the checkpoints to continue from
    origin: str  # of these checkpoints, for people
    device: str
    gpus: dict[str, str]  # CUDA_VISIBLE_DEVICES by node


@dataclass
class Node:
    """A node that has joined its gang."""

    request: Request
    gang: Gang
    start: Start
    plan: NodePlan
    folder: RunFolder
    datastore: MetaflowDatastore
    attempt: int
    has_shared_disk: bool  # with the leader
    injects_faults: bool  # only the first attempt of the first run does

    @property
    def own(self) -> int:
        return self.gang.member.node

    @property
    def is_leader(self) -> bool:
        return self.gang.member.is_leader

    @property
    def owns_folder(self) -> bool:
        """Whether this node shows and removes the run folder."""
        return self.is_leader or not self.has_shared_disk

    @property
    def lost(self) -> str:
        """Why the gang ends, if another node has failed or is lost."""
        outcome = self.gang.outcome
        is_other = outcome is not None and outcome.is_failure and outcome.node not in (-1, self.own)
        return outcome.reason if outcome is not None and is_other else ""

    def train(self) -> int:
        """Start the ranks of this node and wait for all nodes. Returns the exit code of this node."""
        uploader = CheckpointUploader(self.folder, self.datastore) if self.is_leader else None
        if uploader is not None:
            uploader.start()
        code = EXIT_INTERNAL
        try:
            code = self._run()
        finally:
            if uploader is not None:
                uploader.close()
            self.gang.report_end(code)
            self.gang.wait_for_outcome()
        return code

    def close(self) -> None:
        """The leader removes its folder last: nodes on the same machine use it too."""
        self.gang.disconnect(_LOST_GRACE_S if self.is_leader else 0.0)
        if self.owns_folder:
            shutil.rmtree(self.folder.path.parent, ignore_errors=True)

    def _run(self) -> int:
        hidden = self.folder.path.parent
        with start_child(self._arguments(), hidden_folder=hidden, environment=self._environment()) as child:
            with _stop_signals_to(child):
                self._wait(child)
            return child.wait()

    def _wait(self, child: Child) -> None:
        lost_at_s = 0.0
        while child.is_running:
            self._fetch_uploads()
            if self.lost:
                lost_at_s = lost_at_s or time.monotonic()
                if time.monotonic() - lost_at_s > _LOST_GRACE_S:
                    print(f"{printable(self.lost)}: the ranks of this node are ended", file=sys.stderr, flush=True)
                    child.stop_as_if_abandoned()
                    return
            with suppress(subprocess.TimeoutExpired):
                child.wait(_POLL_S)

    def _fetch_uploads(self) -> None:
        """Ranks of this node may need what rank 0 has saved. A shared disk already has it."""
        newest: Upload | None = None
        while not self.gang.uploads.empty():
            newest = self.gang.uploads.get()
        if newest is None or self.has_shared_disk:
            return
        try:
            self.datastore.replace_by(newest)
        except Exception as error:  # too late for this attempt; the next one starts with all checkpoints
            text = self.datastore.describe(error)
            print(f"warning: a checkpoint was not fetched: {text}", file=sys.stderr, flush=True)

    def _arguments(self) -> list[str]:
        recipe = self.folder.path.parent / f"{self.request.name}.yaml"
        recipe.write_text(self.request.recipe)
        flags = [f"--processes={self.request.processes_per_node}", f"--output-dir={self.folder.path}"]
        flags += ["--resume=auto", f"--max-restarts={self.request.max_restarts}"]
        if self.request.best_is_latest:
            flags.append("--best-is-latest")
        if len(self.start.nodes) > 1:
            flags += ["--stop-signals", "SIGTERM"]  # the other signals are Slurm's
        if self.request.shares_cores:
            flags += [f"--omp-num-threads={self._threads()}"]
        if self.plan.device:
            flags += [f"--device={self.plan.device}"]
        if not self.injects_faults:
            flags += ["--inject="]
        return ["train", str(recipe), *flags]

    def _threads(self) -> int:
        ranks_here = self.request.processes_per_node * len(_neighbours(self.start.nodes, self.own))
        return max(1, usable_cores() // ranks_here)

    def _environment(self) -> dict[str, str]:
        environment = {OUTPUT: BRIEF, **os.environ, TEMPORARY: "1"}
        member = self.gang.member
        if member.nodes > 1:
            environment.update(agent_variables(Nodes(member.nodes, member.node, member.host, self.start.port)))
            environment[RUN_SECRET] = member.secret.decode()
        if not self.has_shared_disk:
            environment[NODE_LOCAL] = "1"  # checkpoints come from the datastore
        gpus = self.plan.gpus.get(str(self.own))
        if gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpus
        return environment


def member_of(name: str, *, node: int, nodes: int, host: str, timeout_s: float, secret: bytes) -> GangMember:
    """A node of the gang `name`: flow, run, step and attempt. The ports follow from the name."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4])
    return GangMember(
        node=node,
        nodes=nodes,
        host=host,
        ports=tuple(FIRST_PORT + (seed + 37 * number) % PORTS for number in range(_PORT_CANDIDATES)),
        context=f"metaflow {name}",
        timeout_s=timeout_s,
        hint="look at their logs; --node-timeout-s waits longer",
        secret=secret,
        lost_nodes_return=False,  # a lost task returns only in the next attempt of the whole step
    )


def join(
    request: Request,
    member: GangMember,
    checkpoint: CurrentCheckpoint,
    attempt: int,
    keys: list[str],
    origin: str = "",
    *,
    is_resumed: bool = False,
) -> Node:
    """Wait for the other nodes. `keys`: on the leader, the checkpoints to continue from; `origin` describes them."""
    gang = Gang(member)

    def open_datastore(folder: RunFolder) -> MetaflowDatastore:
        return MetaflowDatastore(
            folder,
            checkpoint,
            request.about,
            best_is_latest=request.best_is_latest,
            on_upload=gang.send_upload,
        )

    prepared: list[MetaflowDatastore] = []

    def make_plan(nodes: list[Hello]) -> tuple[int, dict[str, Any]]:
        """The leader's folder is ready before the other nodes start: they may use the same disk."""
        folder = _make_folder(request.work_dir)
        prepared.append(open_datastore(folder))
        prepared[0].fetch(keys)
        mark = uuid4().hex
        (folder.path / _MARK).write_text(mark)
        device, gpus = _share_gpus(request, nodes)
        plan = NodePlan(str(folder.path), mark, tuple(keys), origin, device, gpus)
        return free_port() if member.nodes > 1 else 0, asdict(plan)

    try:
        start = gang.join(make_plan=make_plan)
    finally:
        gang.close()
    assert start is not None
    plan = build(NodePlan, start.plan)
    folder = RunFolder(Path(plan.folder))
    datastore = prepared[0] if prepared else open_datastore(folder)
    has_shared_disk = _sees_mark(folder, plan.mark)
    if not has_shared_disk:
        _refuse_shards(request, member)
        print(f"node {member.node} has a disk of its own: checkpoints come from the datastore", flush=True)
        datastore.fetch(list(plan.keys))
    injects_faults = attempt == 0 and not is_resumed
    return Node(request, gang, start, plan, folder, datastore, attempt, has_shared_disk, injects_faults)


def _refuse_shards(request: Request, member: GangMember) -> None:
    if request.is_sharded:
        raise UserError(
            "strategies fsdp and hsdp on several nodes need a disk that all of them share",
            where=f"node {member.node}",
            got=request.work_dir or "a temporary folder of node 0",
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


def _neighbours(nodes: Sequence[Hello], own: int) -> list[int]:
    """The nodes on the machine of this one, with itself. On a laptop: all."""
    return [node.node for node in nodes if node.machine == nodes[own].machine]


def _share_gpus(request: Request, nodes: Sequence[Hello]) -> tuple[str, dict[str, str]]:
    """Device and GPUs of each node. On one machine every node sees all GPUs; with too few, all nodes use the CPU."""
    neighbours = _neighbours(nodes, 0)
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
    """SIGTERM for this task goes to its ranks, which save. The task continues, to upload that checkpoint."""

    def pass_on(number: int, frame: FrameType | None) -> None:
        child.send_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
