"""The launcher's environment as one frozen value."""

from __future__ import annotations

import os
import socket

import pytest

from paceline.errors import UserError
from paceline.runtime.detect import (
    ALONE,
    Nodes,
    RankEnvironment,
    agent_variables,
    build_world,
    read_nodes,
    read_rank_environment,
    threads_per_rank,
)
from paceline.settings.schema import ParallelConfig

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "1",
    "TORCHELASTIC_RUN_ID": "x",
}


def test_no_launcher() -> None:
    assert read_rank_environment({}) is None


def test_torchrun() -> None:
    environment = read_rank_environment(TORCHRUN)
    assert environment is not None
    assert (environment.rank, environment.world_size, environment.launcher) == (3, 4, "torchrun")
    world = build_world(ParallelConfig(device="cpu", omp_num_threads=3), environment)
    assert (world.num_nodes, world.is_primary, world.device, world.backend) == (2, False, "cpu", "gloo")
    assert str(world) == "4 ranks on 2 nodes by torchrun, cpu, gloo, 3 CPU threads each"


def test_missing_variables_are_named() -> None:
    with pytest.raises(UserError, match="LOCAL_RANK, MASTER_ADDR, MASTER_PORT not set"):
        read_rank_environment({"RANK": "0", "WORLD_SIZE": "2"})


@pytest.mark.parametrize("change", [{"RANK": "4"}, {"RANK": "x"}, {"RANK": "-1"}, {"LOCAL_RANK": "2"}])
def test_contradictions_are_refused(change: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"contradicts|not a number"):
        read_rank_environment({**TORCHRUN, **change})


def test_threads_are_divided_between_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.runtime.detect.usable_cores", lambda: 8)
    assert threads_per_rank(ParallelConfig(), 2) == 4
    assert threads_per_rank(ParallelConfig(), 16) == 1
    assert threads_per_rank(ParallelConfig(omp_num_threads=5), 2) == 5


def test_one_rank() -> None:
    assert build_world(ParallelConfig(device="cpu"), ALONE).world_size == 1


@pytest.mark.parametrize(
    ("gpus", "ranks", "ranks_per_gpu", "devices", "backend"),
    [
        (2, 2, 1, ["cuda:0", "cuda:1"], "nccl"),
        (1, 4, 4, ["cuda:0"] * 4, "gloo"),
        (2, 3, 2, ["cuda:0", "cuda:0", "cuda:1"], "gloo"),
        (1, 1, 4, ["cuda:0"], "nccl"),  # a single rank rehearses nothing
    ],
)
def test_a_rehearsal_puts_several_ranks_on_each_gpu(
    monkeypatch: pytest.MonkeyPatch, gpus: int, ranks: int, ranks_per_gpu: int, devices: list[str], backend: str
) -> None:
    """NCCL refuses several ranks on one GPU."""
    monkeypatch.setattr("paceline.runtime.detect.count_gpus_without_torch", lambda: gpus)
    config = ParallelConfig(ranks_per_gpu=ranks_per_gpu)
    worlds = [
        build_world(config, RankEnvironment(rank, ranks, rank, ranks, launcher="paceline")) for rank in range(ranks)
    ]
    assert [world.device for world in worlds] == devices
    assert {world.backend for world in worlds} == {backend}
    assert {world.ranks_per_gpu for world in worlds} == {ranks_per_gpu if backend == "gloo" else 1}
    with pytest.raises(UserError) as refused:
        build_world(config, RankEnvironment(0, 9, 0, 9, launcher="paceline"))
    assert refused.value.got == f"9 ranks, {gpus} GPUs"


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_a_rehearsal_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr("paceline.runtime.detect.count_gpus_without_torch", lambda: 0)
    with pytest.raises(UserError) as refused:
        build_world(ParallelConfig(device=device, ranks_per_gpu=2), ALONE)  # type: ignore[arg-type]
    assert refused.value.where == "flag --ranks-per-gpu"


def test_an_agent_gets_its_node_rank() -> None:
    nodes = Nodes(3, 1, "fd00::7", 20_032)
    assert read_nodes(agent_variables(nodes)) == nodes
    assert read_nodes({}) == Nodes()
    for text in ("", "2/2@host:1", "0/2@:1", "0/2@host", "a/2@host:1"):
        with pytest.raises(UserError, match="PACELINE_AGENT"):
            read_nodes({"PACELINE_START": "agent", "PACELINE_AGENT": text})


def test_ranks_of_one_machine_use_loopback_unless_the_user_sets_another_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gloo and NCCL listen on the addresses of these variables. Without them, on the address of the host name."""
    from paceline.runtime.group import stay_on_loopback
    from paceline.runtime.peers import loopback_interface

    name = loopback_interface()
    assert name in {interface for _, interface in socket.if_nameindex()}
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    stay_on_loopback()
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == (name, "ib0")


@pytest.mark.parametrize(
    ("change", "is_on_one_node"),
    [
        ({"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "4"}, True),
        ({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}, False),
        ({"LOCAL_WORLD_SIZE": None, "WORLD_SIZE": "4"}, False),  # unknown: the other ranks may be on other machines
    ],
)
def test_one_node_must_be_certain(change: dict[str, str | None], is_on_one_node: bool) -> None:
    """Ranks on different machines could not reach each other through loopback."""
    variables = {"RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "n1", "MASTER_PORT": "1"}
    variables |= {name: value for name, value in change.items() if value is not None}
    environment = read_rank_environment(variables)
    assert environment is not None
    assert environment.is_on_one_node is is_on_one_node
