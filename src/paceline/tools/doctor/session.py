"""Part two, on each rank: rendezvous, compare nodes, connect to every rank, then exchange data and train together."""

from __future__ import annotations

import json
import os
import platform
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

import paceline
from paceline.errors import EXIT_HANG, PacelineError, UserError
from paceline.parallel.collectives import wait_for_all
from paceline.runtime.detect import RankEnvironment, World, build_world
from paceline.runtime.group import ANSWER_TIMEOUT_S, connect_store, stay_on_loopback
from paceline.settings.schema import ParallelConfig
from paceline.tools.bench import collectives
from paceline.tools.bench.limits import find_link, measure_copy_bandwidth
from paceline.tools.doctor import exchange, peers
from paceline.tools.doctor.examine import examine_node
from paceline.tools.doctor.exchange import Sums, measure_pace, try_pairs, try_sums
from paceline.tools.doctor.findings import DoctorFinding, failed, skipped
from paceline.tools.doctor.network import gather_network, own_address
from paceline.tools.doctor.peers import LeftToken, Listener, Probe, leave_token, probe_all, read_token
from paceline.tools.doctor.rank_report import DONE, RankReport
from paceline.tools.doctor.request import DoctorRequest, InjectedFaults, NodeRole
from paceline.training.known_training import KNOWN_HASH, train_alone, train_together
from paceline.training.same_ranks import hash_code

_ARRIVE_S = 25.0  # for ranks that import torch on a slow disk
_DEADLINE_S = 48.0  # for everything a rank does
_COLLECTIVE_S = 15.0
_SIZES = (4 * 2**10, 2**20, 8 * 2**20)
_SECONDS_PER_SIZE = 0.2
_PACE_TRIES = 3
_TOGETHER = ("all-reduce", "pairs", "pace", "links", "training")


# The rendezvous of the doctor: ranks exchange texts through a store, before any process group exists.
#
# Errors name the ranks that do not arrive, and a foreign server at the address.


class RendezvousError(Exception):
    """The rendezvous failed. `missing` are the ranks that did not arrive, if known."""

    def __init__(self, what: str, remedy: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(what)
        self.remedy = remedy
        self.missing = missing


class TextExchange:
    """All ranks, each with a text for the others."""

    def __init__(self, environment: RankEnvironment) -> None:
        self._rank, self._size = environment.rank, environment.world_size
        self.store: Store = PrefixStore(f"paceline/doctor-{environment.attempt}", _open(environment))

    def exchange(self, topic: str, mine: Any, timeout_s: float = _ARRIVE_S) -> list[Any]:
        """Every rank's value for a topic, in the order of ranks. Waits for all ranks."""
        keys = [f"{topic}/{rank}" for rank in range(self._size)]
        self.store.set(keys[self._rank], json.dumps(mine))
        try:
            self.store.wait(keys, timedelta(seconds=timeout_s))
        except dist.DistError:
            missing = tuple(rank for rank, key in enumerate(keys) if not self._has(key))
            who = ", ".join(map(str, missing)) or "0, which keeps the store"
            raise RendezvousError(
                f"rank {who} did not answer within {timeout_s:.0f} s ({topic})",
                "look at the output of those ranks: is one of them still starting, or has it exited?",
                missing,
            ) from None
        return [json.loads(self.store.get(key)) for key in keys]

    def _has(self, key: str) -> bool:
        with suppress(dist.DistError):
            return bool(self.store.check([key]))
        return False

    def close(self) -> None:
        """Wait for rank 0, which exits last because it may hold the store.

        A launcher may end all ranks when the first one exits: rank 0 calls this after it has printed everything.
        """
        with suppress(dist.DistError):
            if self._rank == 0:
                self.store.set("printed", "")
                self.store.wait(
                    [f"closing/{rank}" for rank in range(1, self._size)], timedelta(seconds=ANSWER_TIMEOUT_S)
                )
            else:
                self.store.wait(["printed"], timedelta(seconds=ANSWER_TIMEOUT_S))
                self.store.set(f"closing/{self._rank}", "")


def _open(environment: RankEnvironment) -> Store:
    try:
        return connect_store(environment, _ARRIVE_S, name_timeout_s=0.0)
    except PacelineError as error:
        what = f"{error.what} ({error.got})"
        raise RendezvousError(what, error.hint or "", missing=(0,) if environment.rank > 0 else ()) from error


class Session:
    """The findings so far are in `report`. If the rank hangs, this report is sent."""

    def __init__(self, request: DoctorRequest, environment: RankEnvironment) -> None:
        self._request = request
        self._environment = environment
        self._faults = InjectedFaults(request.faults, environment.rank)
        self._world: World | None = None
        self.report = RankReport(environment.rank, environment.world_size, socket.gethostname())
        self.reports: list[RankReport] = []  # of all ranks, if all finished
        self.close: Callable[[], None] = lambda: None  # call it after everything is printed
        self.is_clean = True  # False if torch's process group was not closed

    def run(self, on_late: Callable[[RankReport], None], begin: Callable[[], None] = lambda: None) -> None:
        """`begin` is called once. At the time limit a thread calls `on_late` and ends the process."""
        begin()
        timer = threading.Timer(_DEADLINE_S, self._give_up, (on_late,))
        timer.daemon = True
        timer.start()
        self._examine_node()
        self._choose_device()
        if self._environment.world_size == 1:
            self._alone()
            self._finish()
            self.reports = [self.report]
        else:
            self._together()
        timer.cancel()

    def _give_up(self, on_late: Callable[[RankReport], None]) -> None:
        self.report.fault_counts = self._faults.fault_counts
        on_late(self.report)
        os._exit(EXIT_HANG)

    def _finish(self) -> None:
        self.report.phase = DONE
        self.report.fault_counts = self._faults.fault_counts

    def _find(self, group: str, *findings: DoctorFinding) -> None:
        self.report.shared += [replace(finding, group=group) for finding in findings]

    # --- Before the rendezvous ----------------------------------------------------------------------------------------

    def _examine_node(self) -> None:
        """One rank per node does this. Under our own launcher, the launcher has done it."""
        environment = self._environment
        if environment.is_supervised or environment.local_rank != 0:
            return
        self.report.phase = "this node alone"
        around = NodeRole(
            local_ranks=environment.local_world_size,
            num_nodes=environment.world_size // environment.local_world_size,
            rendezvous_at=(environment.store_host, environment.store_port) if environment.store_host else None,
            serves=environment.rank == 0 and environment.world_size > 1 and not environment.has_store_server,
        )
        request = replace(self._request, processes=environment.local_world_size)
        report = examine_node(request, around, self._faults)
        self.report.node, self.report.facts = report.findings, report.facts

    def _choose_device(self) -> None:
        try:
            config = ParallelConfig(device=self._request.device)
            self._world = build_world(config, self._environment)
        except UserError:  # part one reports this in more detail
            return
        torch.set_num_threads(self._world.threads)
        if self._world.device.startswith("cuda"):
            torch.cuda.set_device(self._world.device)

    def _alone(self) -> None:
        world = self._world
        if world is None:
            self._find("RANKS", skipped("training", "not tried: there is no device to train on"))
            return
        self._check_login_folder()
        self.report.phase = "training"
        self._find(
            "RANKS",
            exchange.check_pace([measure_pace(world, self._faults)], [world.host]),
            exchange.check_training(
                [train_alone(world.device, self._faults.flips_a_bit)], [], KNOWN_HASH, [world.host]
            ),
        )

    # --- With the other ranks -----------------------------------------------------------------------------------------

    def _together(self) -> None:
        self.report.phase = "rendezvous"
        if self._environment.is_on_one_node:
            stay_on_loopback()
        try:
            rendezvous = TextExchange(self._environment)
            obstacle = self._compare(rendezvous)
            if obstacle:
                self._find("RANKS", *(skipped(name, f"not tried: {obstacle}") for name in _TOGETHER))
            else:
                self._exchange(rendezvous)
            self._finish()
            reports = rendezvous.exchange("report", self.report.to_json())
            self.reports = [RankReport.from_json(report) for report in reports]
            self.close = rendezvous.close
        except RendezvousError as error:
            nodes = [self.report.hosts[rank] for rank in error.missing if rank < len(self.report.hosts)]
            self._find(
                "NODES", failed("rendezvous", str(error), error.remedy, nodes=nodes, missing=list(error.missing))
            )
            self._finish()

    def _compare(self, rendezvous: TextExchange) -> str:
        """Compare the nodes, and check plain connections between them. Returns the reason to stop, or nothing."""
        host = own_address(self._environment.store_host) if self._environment.is_on_one_node else ""
        with Listener(self._faults.wall_clock, host) as listener:
            everyone = rendezvous.exchange("identity", self._identity(listener.port))
            hosts = self.report.hosts = [identity["host"] for identity in everyone]
            self.report.phase = "reach"
            places = [(identity["address"], identity["port"]) for identity in everyone]
            mine = probe_all(places, self._faults.wall_clock)
            rows = rendezvous.exchange("probes", [probe.to_json() for probe in mine])
        probes = [[Probe(**probe) for probe in row] for row in rows]
        versions, reach = peers.check_versions(everyone), peers.check_reach(probes, hosts)
        found = [versions, reach]
        if reach.status == "pass":
            found.append(peers.check_clocks(probes, hosts))
        self._find("NODES", *found, peers.check_mtu(everyone), *self._check_shared_folder(rendezvous))
        if any(identity["device"] is None for identity in everyone):
            return "a rank has no device to compute on"
        if versions.status == "fail":
            return "ranks of different versions may hang"
        return "not every rank can reach every other" if reach.status == "fail" else ""

    def _check_shared_folder(self, rendezvous: TextExchange) -> list[DoctorFinding]:
        """Runs are written to one folder. Rank 0, or the command that started all ranks, writes a file there."""
        hosts, mine = self.report.hosts, read_token()
        if mine is None and len(set(hosts)) == 1:
            return []
        self.report.phase = "shared folder"
        if mine is None and self._environment.rank == 0:
            mine = leave_token(self._request.output_dir)
        token = next((token for token in rendezvous.exchange("token", asdict(mine) if mine else None) if token), None)
        if token is None:
            return []  # the folder cannot be written; part one reports this
        left = LeftToken(**token)
        troubles = rendezvous.exchange("shared", left.find())
        if mine is not None and mine.writer == self.report.host:
            mine.remove()
        return [peers.check_shared(left.folder, left.writer, troubles, hosts)]

    def _check_login_folder(self) -> None:
        token = read_token()
        if token is not None:
            self._find("NODES", peers.check_shared(token.folder, token.writer, [token.find()], [self.report.host]))

    def _identity(self, port: int) -> dict[str, Any]:
        address = own_address(self._environment.store_host)
        interfaces = gather_network().interfaces
        return {
            "rank": self._environment.rank,
            "host": self.report.host,
            "device": self._world.device if self._world else None,
            "address": address,
            "port": port,
            "mtu": next((one.mtu for one in interfaces if one.address == address), 0),
            "versions": {
                "torch": self._faults.version(torch.__version__),
                "paceline": paceline.__version__,
                "code": hash_code(),
                "python": platform.python_version(),
                "cuda": torch.version.cuda,
            },
        }

    def _exchange(self, rendezvous: TextExchange) -> None:
        world = self._world
        assert world is not None
        self.report.phase = "joining"
        try:
            backend = "cpu:gloo,cuda:nccl" if world.backend == "nccl" else world.backend
            dist.init_process_group(
                backend,
                store=PrefixStore("group", rendezvous.store),
                rank=world.rank,
                world_size=world.world_size,
                timeout=timedelta(seconds=_COLLECTIVE_S),
                device_id=torch.device(world.device) if world.backend == "nccl" else None,
            )
            self._work_together(rendezvous, world)
        except RuntimeError as error:  # from torch's collectives: a timeout, or a peer that has exited
            what = f"rank {world.rank} stopped in {self.report.phase}: {str(error).splitlines()[0][:200]}"
            remedy = "plain connections work, torch's fail: try GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, NCCL_DEBUG=INFO"
            self._find("RANKS", failed(self.report.phase, what, remedy, nodes=[world.host]))
            self.is_clean = False

    def _work_together(self, rendezvous: TextExchange, world: World) -> None:
        """Results are sent through the store, not through the process group that is being tested."""
        hosts = self.report.hosts
        self.report.phase = "all-reduce"
        sums = [Sums(**one) for one in rendezvous.exchange("sums", asdict(try_sums(world, self._faults)))]
        self.report.phase = "pairs"
        rows = rendezvous.exchange("pairs", list(try_pairs(world, self._faults).items()))
        pairs = [{partner: (right, seconds) for partner, (right, seconds) in row} for row in rows]
        self._find("RANKS", exchange.check_sums(sums, pairs, hosts), exchange.check_pairs(pairs, hosts))
        self.report.phase = "pace"
        self._find("RANKS", self._check_pace(rendezvous, world))
        self.report.phase = "links"
        self._find("RANKS", self._check_links(rendezvous, world))
        self.report.phase = "training"
        alone = rendezvous.exchange("alone", train_alone(world.device, self._faults.flips_a_bit))
        together = rendezvous.exchange("together", train_together(world, self._faults.flips_a_bit))
        self._find("RANKS", exchange.check_training(alone, together, KNOWN_HASH, hosts))
        wait_for_all(world)
        dist.destroy_process_group()

    def _check_pace(self, rendezvous: TextExchange, world: World) -> DoctorFinding:
        """Measure again if a rank seems slow: on a busy machine any rank may be slow once."""
        best = [float("inf")] * world.world_size
        for attempt in range(_PACE_TRIES):
            found = rendezvous.exchange(f"pace-{attempt}", measure_pace(world, self._faults))
            best = [min(pair) for pair in zip(best, found, strict=True)]
            if max(exchange.slowness(best)) < exchange.SLOW_WARN:
                break
        return exchange.check_pace(best, self.report.hosts)

    def _check_links(self, rendezvous: TextExchange, world: World) -> DoctorFinding:
        wait_for_all(world)  # all ranks measure at the same time: they share the memory bandwidth
        rates = rendezvous.exchange("copy", measure_copy_bandwidth(world.device))
        rows = collectives.measure(
            world, _SIZES, seconds_per_size=_SECONDS_PER_SIZE, operations=collectives.OPERATIONS[:1]
        )
        fits = collectives.fit_rows(rows, world.world_size)
        return exchange.check_links(rows, fits, find_link(world, sum(rates) / len(rates)))
