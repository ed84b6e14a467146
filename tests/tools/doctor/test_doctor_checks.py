"""The doctor's verdicts, one fact at a time. Real runs are in tests/tools/doctor/test_doctor.py."""

from __future__ import annotations

import hashlib
import io
import json
import random
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from harness.ranks import run_ranks
from paceline.data.draws import draw_below
from paceline.errors import UserError
from paceline.runtime.detect import World
from paceline.tools.bench.collectives import Row
from paceline.tools.bench.limits import Limit
from paceline.tools.doctor import rank_report
from paceline.tools.doctor.disk import FolderFacts, check_clock, check_data, check_place, gather_place
from paceline.tools.doctor.examine import Exam, _gather_all, _no_answer
from paceline.tools.doctor.exchange import (
    Sums,
    check_links,
    check_pace,
    check_pairs,
    check_sums,
    check_training,
    measure_pace,
    partners,
    try_pairs,
    try_sums,
)
from paceline.tools.doctor.findings import DoctorFinding, failed, merge_nodes, nodes_to_exclude, passed, verdict, warned
from paceline.tools.doctor.machine import (
    Cores,
    MemoryFacts,
    check_cores,
    check_memory,
    check_open_files,
    check_shared_memory,
    gather_cores,
    gather_memory,
)
from paceline.tools.doctor.network import (
    Interface,
    Names,
    Network,
    Ports,
    check_host_name,
    check_interfaces,
    check_ports,
    check_rendezvous_name,
    gather_ports,
    resolve,
    who_has,
)
from paceline.tools.doctor.peers import (
    Listener,
    Probe,
    check_clocks,
    check_mtu,
    check_reach,
    check_versions,
    fewest_to_leave_out,
    probe,
)
from paceline.tools.doctor.rank_report import Examination, Expected, RankReport, Screen, _as_lines, assemble, read_lines
from paceline.tools.doctor.request import InjectedFault, InjectedFaults, NodeRole, parse_faults
from paceline.tools.doctor.software import Software, Torch, check_devices, check_packages, check_python, check_torch
from paceline.training.known_training import KNOWN_HASH, train_alone, train_together

GB, MB = 2**30, 2**20
SOFTWARE = Software("0.1.0", "3.11.7", ">=3.11", {"torch": "2.13.0+cpu"}, {"torch": ">=2.11"}, "Linux")
TORCH = Torch("2.13.0+cpu", None, "AVX512", has_gloo=True)
GPU = {"name": "H200", "capability": "90", "free_bytes": 139 * GB, "total_bytes": 140 * GB}
CUDA = Torch("2.13.0", "13.0", "AVX512", True, True, "2.28", ("sm_80", "sm_90"), (GPU,), driver="580", driver_gpus=1)
MEMORY = MemoryFacts(8 * GB, 8 * GB, 64 * GB, 60 * GB, None, 65536, 65536)
CORES = Cores(machine=8, usable=8, quota=None, numa_nodes=1, numa_used=1, load=0.1, omp_num_threads="")
PLACE = FolderFacts("runs", "/data", True, True, "", 10**12, 10**6, "ext4", 5e8, 0.001, 0.0)
PORTS = Ports(True, "", None, None, None, 32768, 60999)


def summary(finding: DoctorFinding | None) -> tuple[str, str]:
    """Status and text. A bad finding has a remedy, a good one has none."""
    assert finding is not None
    assert bool(finding.remedy) == (finding.status in ("warn", "fail"))
    return finding.status, finding.what


# --- One node ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "needs", "status"),
    [("2.13.0+cpu", ">=2.11", "pass"), ("2.9.1", ">=2.11", "fail"), ("3.0", ">=2.11,<3", "fail"), ("", ">=2", "fail")],
)
def test_packages_are_compared_with_their_declared_ranges(version: str, needs: str, status: str) -> None:
    found = check_packages(replace(SOFTWARE, packages={"torch": version}, needs={"torch": needs}))
    assert found.status == status
    assert status == "pass" or "torch" in found.what


def test_without_an_installation_the_ranges_are_unknown() -> None:
    assert summary(check_packages(replace(SOFTWARE, packages={}, needs={})))[0] == "skip"


def test_python_is_compared_with_its_range() -> None:
    assert summary(check_python(SOFTWARE))[0] == "pass"
    assert summary(check_python(replace(SOFTWARE, python="3.10.2")))[0] == "fail"


def test_a_torch_that_cannot_be_imported_is_reported_with_its_own_message() -> None:
    assert summary(check_torch(TORCH))[0] == "pass"
    assert summary(check_torch(Torch(error="ImportError: libcudart.so.13"))) == (
        "fail",
        "torch cannot be loaded: ImportError: libcudart.so.13",
    )


@pytest.mark.parametrize(
    ("facts", "device", "processes", "status", "part"),
    [
        (TORCH, "auto", 2, "pass", "no GPU"),
        (TORCH, "cuda", 1, "fail", "there is none here"),
        (replace(TORCH, driver="580", driver_gpus=4), "auto", 0, "warn", "the driver shows 4 GPUs, but torch"),
        (replace(TORCH, driver="580", driver_gpus=4), "cuda", 0, "fail", "is a CPU build"),
        (replace(CUDA, devices=(), cuda_error="driver too old"), "cuda", 0, "fail", "driver too old"),
        (CUDA, "auto", 1, "pass", "1 x H200"),
        (CUDA, "cuda", 2, "fail", "2 ranks, but 1 GPU"),
        (CUDA, "cpu", 8, "pass", "the CPU"),
        (replace(CUDA, architectures=("sm_100",)), "cuda", 1, "fail", "no code for H200"),
        (replace(CUDA, architectures=("sm_70", "compute_80")), "cuda", 1, "pass", "H200"),
        (replace(CUDA, devices=({**GPU, "free_bytes": GB},)), "auto", 1, "warn", "already in use"),
    ],
)
def test_devices_are_compared_with_the_request(
    facts: Torch, device: str, processes: int, status: str, part: str
) -> None:
    found = check_devices(facts, device, processes)
    assert summary(found)[0] == status
    assert part in found.what


@pytest.mark.parametrize(("free", "ranks", "status"), [(63, 2, "fail"), (65, 2, "warn"), (256, 2, "pass")])
def test_shared_memory_grows_with_the_ranks(free: int, ranks: int, status: str) -> None:
    found = check_shared_memory(replace(MEMORY, shm_free_bytes=free * MB), ranks)
    assert summary(found)[0] == status
    assert status == "pass" or "--shm-size" in found.remedy


def test_open_files_memory_and_cores() -> None:
    assert [summary(check_open_files(replace(MEMORY, open_files=n)))[0] for n in (200, 512, 1024)] == [
        "fail",
        "warn",
        "pass",
    ]
    assert check_open_files(replace(MEMORY, open_files=512)).remedy == "ulimit -n 65536"
    assert summary(check_memory(MEMORY, 8))[0] == "pass"
    status, what = summary(check_memory(replace(MEMORY, limit_bytes=2 * GB), 8))
    assert (status, "may use 2.0 GB" in what) == ("warn", True)
    assert summary(check_cores(CORES, 8))[0] == "pass"
    assert summary(check_cores(CORES, 9))[0] == "warn"
    assert summary(check_cores(replace(CORES, quota=1.5), 4)) == (
        "warn",
        "8 of 8 cores, but CPU time for only 1.5 of them for 4 ranks",
    )
    assert summary(check_cores(replace(CORES, omp_num_threads="4"), 4))[0] == "warn"
    assert "2 of 4 NUMA nodes" in check_cores(replace(CORES, numa_nodes=4, numa_used=2), 4).what


def test_limits_of_a_container_are_read_from_its_cgroups(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1073741824\n")
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert gather_memory(cgroup=tmp_path).limit_bytes == GB
    assert gather_cores(cgroup=tmp_path).quota == 1.5
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert gather_memory(cgroup=tmp_path).limit_bytes is None
    assert gather_cores(cgroup=tmp_path).quota is None


def test_a_folder_is_full_forbidden_slow_or_good() -> None:
    def look(**changes: Any) -> tuple[str, str]:
        return summary(check_place("run folder", replace(PLACE, **changes), flag="--output-dir"))

    assert look()[0] == "pass"
    assert look(free_bytes=10**6) == ("fail", "runs: the disk is full, 1 MB are free")
    assert look(error="Permission denied") == ("fail", "runs cannot be written: Permission denied")
    assert look(error="No space left on device", free_bytes=0)[1] == "runs: the disk is full, 0 MB are free"
    assert look(free_files=3)[0] == "fail"
    assert look(free_bytes=10**9)[0] == "warn"
    assert look(write_bytes_per_s=1e6)[0] == look(fsync_s=3.0)[0] == "warn"
    assert summary(check_data(replace(PLACE, error="Read-only file system", is_empty=False)))[0] == "pass"
    assert summary(check_data(replace(PLACE, error="Read-only file system", is_empty=True)))[0] == "fail"


def test_a_probe_file_is_written_and_removed(tmp_path: Path) -> None:
    found = gather_place(tmp_path / "not" / "yet")
    assert (found.exists, found.stands_in, found.error) == (False, str(tmp_path), "")
    assert (found.write_bytes_per_s or 0) > 0
    assert abs(found.clock_ahead_s or 9) < 1
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert gather_place(tmp_path / "file").error == "it is a file, not a folder"
    late = gather_place(tmp_path, InjectedFaults((InjectedFault("clock"),)).wall_clock, measures=False)
    assert -101 < (late.clock_ahead_s or 0) < -99


def test_the_clock_is_compared_with_the_disk_and_with_itself() -> None:
    now = 1.8e9
    assert summary(check_clock(PLACE, now, 0.0))[0] == "pass"
    assert [summary(check_clock(replace(PLACE, clock_ahead_s=s), now, 0.0))[0] for s in (-100, 5)] == [
        "fail",
        "warn",
    ]
    assert "100.0 s ahead of the clock of the disk" in check_clock(replace(PLACE, clock_ahead_s=-100), now, 0.0).what
    assert summary(check_clock(replace(PLACE, clock_ahead_s=None), now, 0.0))[0] == "pass"
    assert summary(check_clock(PLACE, 1e9, 0.0)) == ("fail", "the clock is years behind")
    assert summary(check_clock(PLACE, now, 30.0))[0] == "fail"


def test_names() -> None:
    alone, several = NodeRole(), NodeRole(num_nodes=2)
    good = Names("n1", ("10.0.0.1",), "", 0.0)
    assert summary(check_host_name(good, several))[0] == "pass"
    assert summary(check_host_name(replace(good, addresses=(), error="not known"), alone))[0] == "fail"
    local = replace(good, addresses=("127.0.1.1",))
    assert [check_host_name(local, around).status for around in (alone, several)] == ["pass", "fail"]
    assert summary(check_host_name(replace(good, lookup_s=3.0), alone))[0] == "warn"
    assert check_rendezvous_name(good) is None
    lost = replace(good, rendezvous_at="nowhere", rendezvous_error="not known")
    assert summary(check_rendezvous_name(lost)) == ("fail", "MASTER_ADDR nowhere does not resolve: not known")
    assert resolve("no-such-host.invalid")[0] == ()


def test_a_used_port_names_the_process() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        holder = who_has(port)
        assert holder is not None
        assert holder.startswith("process ")
        found = check_ports(gather_ports("127.0.0.1", port))
        status, what = summary(found)
        assert status == "fail"
        assert f"port {port}" in what
        assert holder in what
    assert who_has(port) is None
    assert summary(check_ports(replace(PORTS, is_open_here=False, error="timed out")))[0] == "fail"
    assert summary(check_ports(replace(PORTS, default_taken_by="process 1 (python)")))[0] == "warn"
    assert summary(check_ports(replace(PORTS, last=32800)))[0] == "warn"


def test_a_chosen_interface_must_exist() -> None:
    network = Network((Interface("lo", "127.0.0.1", 65536, True), Interface("eth0", "10.0.0.1", 9000, True)), {})
    assert summary(check_interfaces(network)) == ("pass", "eth0 10.0.0.1 (MTU 9000)")
    for variable, value, status in (
        ("GLOO_SOCKET_IFNAME", "eth0", "pass"),
        ("GLOO_SOCKET_IFNAME", "eth", "fail"),
        ("NCCL_SOCKET_IFNAME", "eth", "pass"),
        ("NCCL_SOCKET_IFNAME", "=eth", "fail"),
        ("NCCL_SOCKET_IFNAME", "^docker", "pass"),
    ):
        assert summary(check_interfaces(replace(network, chosen={variable: value})))[0] == status, (variable, value)


def test_missing_facts_delay_only_until_their_deadline() -> None:
    never = threading.Event()
    slow = Exam("run folder", "DISK", lambda: never.wait(60), lambda _: [], 0.05, "df")
    quick = Exam("cores", "MACHINE", gather_cores, lambda _: [], 5, "lscpu")
    broken = Exam("memory", "MACHINE", lambda: 1 / 0, lambda _: [], 5, "ls /dev/shm")
    answers = _gather_all([slow, quick, broken])
    never.set()
    assert isinstance(answers[1], Cores)
    assert summary(_no_answer(slow, answers[0])) == ("fail", "no answer within 0.05 s")
    assert "ZeroDivisionError" in _no_answer(broken, answers[2]).what


# --- Several nodes ----------------------------------------------------------------------------------------------------

HOSTS = ["n1", "n1", "n2", "n2"]


def identity(host: str, torch: str = "2.13", mtu: int = 1500) -> dict[str, Any]:
    return {"host": host, "mtu": mtu, "versions": {"torch": torch, "paceline": "0.1"}}


def test_a_different_version_or_mtu_is_named() -> None:
    alike = [identity("n1"), identity("n2"), identity("n3")]
    assert summary(check_versions(alike))[0] == summary(check_mtu(alike))[0] == "pass"
    odd = check_versions([alike[0], identity("n2", torch="2.11"), alike[2]])
    assert summary(odd) == ("fail", "torch 2.11 at rank 1 on n2, 2.13 at the others")
    assert odd.nodes == ("n2",)
    jumbo = check_mtu([alike[0], alike[1], identity("n3", mtu=9000)])
    assert (summary(jumbo)[0], jumbo.nodes) == ("warn", ("n3",))


def probes(ranks: int, shut: set[tuple[int, int]] = frozenset(), ahead: dict[int, float] | None = None) -> Any:  # type: ignore[assignment]
    offsets = ahead or {}
    return [
        [Probe("timed out") if (a, b) in shut else Probe("", offsets.get(b, 0.0), 1e-4) for b in range(ranks)]
        for a in range(ranks)
    ]


def test_blocked_connections_exclude_as_few_nodes_as_possible() -> None:
    assert summary(check_reach(probes(4), HOSTS))[0] == "pass"
    one = check_reach(probes(4, {(0, 2), (2, 0)}), HOSTS)
    assert summary(one)[0] == "fail"
    assert "2 of 12" in one.what
    assert "rank 0 on n1 does not reach rank 2 on n2 (timed out)" in one.what
    assert one.nodes == ("n2",)
    assert fewest_to_leave_out([(0, 1), (1, 0), (1, 2), (3, 1)]) == [1]
    assert fewest_to_leave_out([(0, 1), (2, 3)]) == [1, 3]


def test_a_wrong_clock_is_named() -> None:
    assert summary(check_clocks(probes(4), HOSTS))[0] == "pass"
    late = check_clocks(probes(4, ahead={2: -100.0}), HOSTS)
    assert summary(late) == ("fail", "the clock of rank 2 on n2 is 100.0 s behind the others")
    assert late.nodes == ("n2",)
    assert summary(check_clocks(probes(2, ahead={1: 5.0}), HOSTS[:2]))[0] == "warn"
    # Rank 0 is wrong: it sees all other clocks as wrong.
    first = check_clocks(probes(4, ahead={1: 50.0, 2: 50.0, 3: 50.0}), ["n0", "n1", "n2", "n3"])
    assert (summary(first)[1], first.nodes) == ("the clock of rank 0 on n0 is 50.0 s behind the others", ("n0",))


def test_a_probe_reads_the_other_clock_and_sends_large_messages() -> None:
    with Listener(InjectedFaults((InjectedFault("clock"),)).wall_clock) as listener:
        found = probe(("127.0.0.1", listener.port))
    assert found.error == ""
    assert 99 < found.clock_ahead_s < 101
    assert 0 < found.round_trip_s < 1
    assert probe(("127.0.0.1", listener.port)).error == "Connection refused"


# --- Ranks together ---------------------------------------------------------------------------------------------------


def test_the_wrong_rank_is_named_by_itself_or_by_all_its_receivers() -> None:
    good = [Sums(True, True)] * 3
    right = [{b: (True, 0.001) for b in range(3) if b != a} for a in range(3)]
    assert summary(check_sums(good, right, ["a", "b", "c"]))[0] == "pass"
    own = check_sums([Sums(True, False), Sums(False, False), Sums(True, False)], right, ["a", "b", "c"])
    assert (own.status, own.nodes, own.details["wrong_ranks"]) == ("fail", ("b",), [1])
    sends_wrong = [{**row, 1: (False, 0.001)} if rank != 1 else row for rank, row in enumerate(right)]
    assert check_sums([Sums(True, False)] * 3, sends_wrong, ["a", "b", "c"]).nodes == ("b",)
    hears_wrong = [{0: (False, 0.001), 1: (False, 0.001)} if rank == 2 else row for rank, row in enumerate(right)]
    assert check_sums([Sums(True, False)] * 3, hears_wrong, ["a", "b", "c"]).nodes == ("c",)
    on_the_way = check_sums([Sums(True, False)] * 2, [{1: (False, 0.001)}, {0: (True, 0.001)}], ["a", "b"])
    assert on_the_way.nodes == ("a", "b")
    assert "rank 1 on b" in on_the_way.what
    assert "rank 0 on a" in on_the_way.what
    algorithm = check_sums([Sums(True, False)] * 3, right, ["a", "b", "c"])
    assert (algorithm.status, algorithm.nodes) == ("fail", ())


def test_the_slow_rank_is_named() -> None:
    assert summary(check_pace([1.0, 1.2, 1.1], ["a", "b", "c"]))[0] == summary(check_pace([1.0], ["a"]))[0] == "pass"
    slow = check_pace([1.0, 3.0], ["a", "b"])
    assert (slow.status, slow.nodes, slow.what) == (
        "fail",
        ("b",),
        "rank 1 on b is slow: 3.0 times the others' time for the same work",
    )
    assert check_pace([1.0, 1.0, 1.7], ["a", "b", "c"]).status == "warn"
    both = check_pace([1.0, 1.0, 3.0, 1.7], ["a", "b", "c", "d"])  # d alone would only give a warning
    assert (both.status, both.nodes) == ("fail", ("c",))


def test_speed_is_measured_on_one_thread_and_the_threads_are_restored() -> None:
    seen: set[int] = set()

    class Watched(InjectedFaults):
        def slow_down(self, seconds: float) -> None:
            seen.add(torch.get_num_threads())

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        measure_pace(World(0, 1, 0, 1, "a test", "here", "cpu", "gloo", 3), Watched())
        assert (seen, torch.get_num_threads()) == ({1}, 3)
    finally:
        torch.set_num_threads(before)


def test_a_slow_link_counts_if_both_ends_measure_it() -> None:
    def pairs(slow: set[tuple[int, int]]) -> Any:
        return [{b: (True, 0.05 if (a, b) in slow else 0.001) for b in range(4) if b != a} for a in range(4)]

    hosts = ["a", "b", "c", "d"]
    assert summary(check_pairs(pairs(set()), hosts))[0] == summary(check_pairs(pairs({(1, 3)}), hosts))[0] == "pass"
    assert check_pairs(pairs({(1, 3), (3, 1)}), hosts).nodes == ("b", "d")


def test_links_are_compared_with_their_limit() -> None:
    def row(bandwidth: float, seconds: float = 1e-4, is_right: bool = True) -> Row:
        return Row("all-reduce", 4096, 3, seconds, seconds, bandwidth, bandwidth, is_right)

    nominal = Limit(10e9, "NVLink")
    assert summary(check_links([row(5e9)], [], nominal))[0] == "pass"
    assert summary(check_links([row(1e9)], [], nominal))[0] == "warn"
    assert summary(check_links([row(1e9)], [], replace(nominal, is_measured=True)))[0] == "pass"
    assert summary(check_links([row(5e9, seconds=0.5)], [], None))[0] == "warn"
    assert summary(check_links([row(5e9, is_right=False)], [], nominal))[0] == "fail"


def test_training_is_checked_alone_and_together() -> None:
    hosts = ["a", "b"]
    assert summary(check_training(["x", "x"], ["x", "x"], "x", hosts))[0] == "pass"
    wrong = check_training(["x", "y"], ["z", "z"], "x", hosts)
    assert (wrong.nodes, wrong.details["wrong_ranks"]) == (("b",), [1])
    astray = check_training(["x", "x"], ["x", "z"], "x", hosts)
    assert (astray.status, astray.nodes) == ("fail", ())


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 8, 63, 64, 65, 100])
def test_in_every_round_partners_agree_and_all_pairs_occur(world_size: int) -> None:
    rounds = [partners(rank, world_size) for rank in range(world_size)]
    for rank, mine in enumerate(rounds):
        assert all(rounds[partner][number] == rank for number, partner in enumerate(mine))
        if world_size <= 64:
            assert sorted({*mine, rank}) == list(range(world_size))


def work_together(world: World, to_inject: tuple[InjectedFault, ...]) -> tuple[Any, ...]:
    faults = InjectedFaults(to_inject, world.rank)
    pace = min(measure_pace(world, faults) for _ in range(2))
    return (
        try_sums(world, faults),
        try_pairs(world, faults),
        pace,
        train_together(world, faults.flips_a_bit),
        faults.fault_counts,
    )


def test_three_healthy_real_ranks_get_the_known_weights() -> None:
    for sums, pairs, _, weights, fault_counts in run_ranks(3, work_together, ()):
        assert sums == Sums(True, True)
        assert all(right for right, _ in pairs.values())
        assert (weights, fault_counts) == (KNOWN_HASH, {})


def test_an_injected_wrong_rank_and_a_slow_one_are_named_among_three() -> None:
    faults = (InjectedFault("wrong", 1), InjectedFault("slow", 2))
    sums, pairs, paces, weights, fault_counts = zip(*run_ranks(3, work_together, faults), strict=True)
    found = check_sums(sums, pairs, ["a", "b", "c"])
    assert (found.status, found.nodes) == ("fail", ("b",))
    assert check_pace(paces, ["a", "b", "c"]).nodes == ("c",)
    assert len(set(weights)) == 1  # all received the same wrong number
    assert weights[0] != KNOWN_HASH
    assert fault_counts[1]["wrong"] == 3
    assert fault_counts[2]["slow"] > 0


# --- The training with a known result ---------------------------------------------------------------------------------


def tree(values: Any) -> Any:
    """Add over the first axis: neighbours first, then neighbours of those."""
    while len(values) > 1:
        values = values[0::2] + values[1::2]
    return values[0]


def test_plain_numpy_gets_the_known_hash() -> None:
    import torch

    f = np.float32
    numbers = draw_below(17, torch.arange(64 * 16), 1).numpy().reshape(64, 16) - 8
    x = (numbers / 8).astype(f)
    targets = np.zeros((64, 4), f)
    targets[np.arange(64), numbers.reshape(64, 4, 4).sum(2).argmax(1)] = 1
    weights = ((draw_below(257, torch.arange(340), 2).numpy() - 128) / 512).astype(f)
    speed: Any = np.zeros_like(weights)
    for _ in range(30):
        w1, b1, w2, b2 = np.split(weights, [256, 272, 336])
        w1, w2 = w1.reshape(16, 16), w2.reshape(4, 16)
        before = tree((x[:, None, :] * w1).transpose(2, 0, 1)) + b1
        hidden = np.maximum(before, f(0))
        error = tree((hidden[:, None, :] * w2).transpose(2, 0, 1)) + b2 - targets
        back = tree((error[:, None, :] * w2.T).transpose(2, 0, 1)) * (before > 0)
        outer = [back[:, :, None] * x[:, None], back, error[:, :, None] * hidden[:, None], error]
        rows = np.concatenate([part.reshape(64, -1) for part in outer], axis=1)
        speed = speed * f(0.875) + tree(rows) / f(64)
        weights = weights - speed * f(0.0625)
    assert weights.dtype == f
    assert hashlib.sha256(weights.tobytes()).hexdigest() == KNOWN_HASH


def test_one_flipped_bit_changes_the_hash() -> None:
    assert train_alone("cpu") == KNOWN_HASH
    faults = InjectedFaults((InjectedFault("wrong"),))
    assert train_alone("cpu", faults.flips_a_bit) != KNOWN_HASH
    assert faults.fault_counts == {"wrong": 1}


# --- Rank reports, lists, screens -------------------------------------------------------------------------------------


PYTHON = replace(passed("python", "3.11"), group="SOFTWARE")


def report_of(rank: int, host: str, **more: Any) -> RankReport:
    return RankReport(rank, 3, host, **{"phase": "done", "node": [PYTHON], **more})


def test_rank_reports_are_read_from_mixed_and_truncated_lines() -> None:
    reports = [
        report_of(rank, f"n{rank}", facts={"text": random.Random(rank).randbytes(4000).hex()}) for rank in range(3)
    ]
    lines = [line for one in reports for line in _as_lines(one)] + ["srun: something else", ""]
    random.Random(0).shuffle(lines)
    assert max(map(len, lines)) < 1000
    assert read_lines(lines) == (reports, ["srun: something else"])
    torn = [line for line in lines if not line.startswith("paceline-doctor: 1 0 ")]
    assert read_lines(torn)[0] == [reports[0], reports[2]]


def test_nodes_are_grouped_if_they_agree_and_named_if_not() -> None:
    merged = merge_nodes(
        {
            "n1": [passed("python", "3.11"), passed("clock", "0.01 s")],
            "n2": [passed("python", "3.11"), passed("clock", "0.02 s")],
            "n3": [passed("python", "3.11"), failed("clock", "off by 9 s", "set it")],
        }
    )
    assert [(one.status, one.what, one.nodes) for one in merged] == [
        ("pass", "3.11 (n1; 3 nodes pass)", ()),
        ("pass", "0.01 s (n1; 2 nodes pass)", ()),
        ("fail", "off by 9 s (n3)", ("n3",)),
    ]
    assert nodes_to_exclude(merged, ["n1", "n2", "n3"]) == ["n3"]
    assert nodes_to_exclude([failed("x", "", "", nodes=["n1"])], ["n1"]) == []  # no node would be left


def test_a_separate_rank_and_a_silent_rank_are_named() -> None:
    reports = [
        report_of(0, "n0", phase="links"),
        report_of(1, "n1", phase="pairs"),
        report_of(2, "n2", phase="links"),
    ]
    found = assemble(reports, Expected(3, "srun", ("n0", "n1", "n2"))).findings[-1]
    assert (found.name, found.status, found.nodes) == ("ranks", "fail", ("n1",))
    assert "rank 1 on n1 in pairs" in found.what
    silent = assemble(reports[:2], Expected(3, "srun", ("n0", "n1", "n2"), "srun: n2 is gone")).findings[-1]
    assert "rank 2 (node n2): srun: n2 is gone" in silent.what
    assert silent.nodes == ("n2",)


def test_the_verdict_is_one_line() -> None:
    good = [passed("a", ""), warned("b", "", "")]
    assert verdict(good, 12.34) == "healthy: 1 checks passed, 1 warning, in 12.3 s"
    assert (
        verdict([*good, failed("c", "", "")], 1.0) == "not fit to train: 1 of 3 checks failed (c), 1 warning, in 1.0 s"
    )


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def test_symbols_if_the_terminal_supports_them_and_words_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    finding = replace(failed("clock", "off by 9 s", "set it"), group="DISK")
    colourful = "\n".join(Screen(Terminal(io.BytesIO(), "utf-8")).lines([finding]))
    assert "\033[31m✗\033[0m clock" in colourful
    for stream in (io.StringIO(), Terminal(io.BytesIO(), "ascii")):
        plain = "\n".join(Screen(stream).lines([finding]))
        assert "FAIL" in plain
        assert plain.isascii()
        assert "try: set it" in plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033" not in "\n".join(Screen(Terminal(io.BytesIO(), "utf-8")).lines([finding]))


def test_the_report_contains_no_secrets_and_no_home_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("PACELINE_API_TOKEN", "a-secret-value")
    monkeypatch.setenv("PACELINE_RUN_SECRET", "a-secret-value")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-value")
    findings = [failed("run folder", "/home/somebody/runs | cannot be written", "chmod")]
    text = rank_report.write_markdown(Examination(findings, ["n1"], 2, "paceline", {"n1": {"at": "/home/somebody/x"}}))
    assert "somebody" not in text
    assert "a-secret-value" not in text
    assert '"NCCL_DEBUG": "INFO"' in text
    assert "| fail | run folder | ~/runs \\| cannot be written | chmod |" in text
    content = rank_report.to_json(Examination(findings, ["n1"], 2, "paceline"))
    assert json.loads(json.dumps(content)) == content
    assert content["healthy"] is False


def test_injected_faults_are_parsed_and_refused() -> None:
    assert parse_faults("slow rank=1; wrong") == (InjectedFault("slow", 1), InjectedFault("wrong", 0))
    for text in ("flood", "slow step=3", "slow rank=x"):
        with pytest.raises(UserError):
            parse_faults(text)
