"""Ranks of one node add through shared memory: the same bits on all ranks, and no rank waits for a dead one."""

from __future__ import annotations

import gc
import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from harness.ranks import make_world, run_ranks
from harness.runs import step_losses, train_in
from paceline.data.registry import load_dataset
from paceline.data.shared import load_once_per_node
from paceline.errors import Cause, PacelineError
from paceline.parallel.collectives import gather_texts, tree_sum
from paceline.parallel.node_sum import NodeBarrier, NodeSum, barrier_bytes, open_node_sum
from paceline.runtime.detect import World
from paceline.runtime.node_memory import SWITCH, share_memory
from paceline.settings.schema import DataConfig

SIZES = (1, 2, 15, 17, 64, 1001, 40_003)


def row_of(rank: int, size: int, turn: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * turn + rank))


def opened(size: int, world: World) -> NodeSum:
    node_sum = open_node_sum(size, world)
    assert node_sum is not None
    return node_sum


def add_up(world: World) -> list[tuple[int, int, bytes, float]]:
    answers = []
    for size in SIZES:
        node_sum = opened(size, world)
        for turn in range(3):
            node_sum.mine.copy_(row_of(world.rank, size, turn))
            norm = node_sum.add_up(scale=1 / world.world_size, measured=max(size - 2, 1))
            answers.append((size, turn, node_sum.total.numpy().tobytes(), norm))
    return answers


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_rank_sees_the_bits_of_the_tree(ranks: int) -> None:
    answers = run_ranks(ranks, add_up)
    assert all(answer == answers[0] for answer in answers)
    for size, turn, total, norm in answers[0]:
        expected = tree_sum(torch.stack([row_of(rank, size, turn) for rank in range(ranks)])) * (1 / ranks)
        assert total == expected.numpy().tobytes()
        # Here summed in parts, there at once.
        assert norm == pytest.approx(float(expected[: max(size - 2, 1)].double().norm()), rel=1e-5)


def scale(world: World) -> list[float]:
    node_sum = opened(40, world)
    for _ in range(20):
        node_sum.mine.fill_(1.0)
        node_sum.add_up()
        node_sum.scale(0.5)
    return node_sum.total.tolist()


def test_a_total_is_scaled_once() -> None:
    assert run_ranks(3, scale) == [[1.5] * 40] * 3


def gather(world: World) -> list[list[list[float]]]:
    node_sum = opened(5, world)
    node_sum.mine.fill_(1.0)
    answers = []
    for turn in range(50):  # directly one after the other: no rank may overwrite values that another has not read yet
        answers.append(
            node_sum.gather(torch.tensor([turn + world.rank / 7, -1e300, world.rank], dtype=torch.float64)).tolist()
        )
        if turn % 10 == 0:
            assert node_sum.add_up(measured=1) > 0
            node_sum.mine.fill_(1.0)
    return answers


def test_small_values_of_all_ranks_reach_every_rank_unchanged() -> None:
    answers = run_ranks(3, gather)
    expected = [[[turn + rank / 7, -1e300, float(rank)] for rank in range(3)] for turn in range(50)]
    assert answers == [expected] * 3


def see_a_nan(world: World) -> float:
    node_sum = opened(100, world)
    node_sum.mine.fill_(float("nan") if world.rank == 1 else 1.0)
    return node_sum.add_up(measured=100)


def test_a_nan_of_one_rank_is_in_the_norm_of_all() -> None:
    assert all(norm != norm for norm in run_ranks(2, see_a_nan))


def outlive_the_other(world: World) -> tuple[Cause | None, float, bool]:
    """This process is the first rank of a node, its child the second. The child adds once and is killed."""
    places = [make_world(rank, 2) for rank in range(2)]
    shared = share_memory(
        barrier_bytes(2), places[0], lambda text: [text], lambda memory: NodeBarrier.prepare(memory, ranks=2)
    )
    assert shared is not None
    child = os.fork()
    if child == 0:
        shared.hold_place(1)
        NodeBarrier(shared, places[1]).wait()
        os.kill(os.getpid(), signal.SIGKILL)
    shared.hold_place(0)
    barrier = NodeBarrier(shared, places[0])
    barrier.wait()
    began = time.monotonic()
    try:
        barrier.wait()
    except PacelineError as error:
        # The child is a zombie, still in the process table. It must not count as alive.
        return error.cause, time.monotonic() - began, os.waitpid(child, 0)[1] == signal.SIGKILL
    return None, 0.0, False


def test_a_killed_rank_ends_the_others() -> None:
    ((cause, seconds, is_killed),) = run_ranks(1, outlive_the_other)
    assert cause is Cause.PEER_LOST
    assert is_killed
    assert seconds < 10  # a fifth of a second on an idle machine


def shared_memory_of(world: World) -> tuple[list[str], list[str]]:
    """Names in /dev/shm, and our mappings of this process."""
    before = set(Path("/dev/shm").iterdir())
    node_sum = opened(1000, world)
    gather_texts("", world)
    names = sorted(path.name for path in set(Path("/dev/shm").iterdir()) - before)
    mapped = [line.split()[-2] for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:paceline" in line]
    gather_texts("", world)
    del node_sum
    return [name for name in names if "paceline" in name], mapped


def test_the_shared_memory_has_no_name() -> None:
    for names, mapped in run_ranks(2, shared_memory_of):
        assert names == []
        assert mapped


def train_without(world: World, folder: str, flags: tuple[str, ...]) -> dict[str, object]:
    os.environ[SWITCH] = "off"
    return train_in(world, folder, flags)


@pytest.mark.parametrize("flags", [(), ("--exact", "--lanes", "4"), ("--clip-norm", "0.1")])
def test_two_ranks_train_with_the_bits_of_stock_ddp(tmp_path: Path, flags: tuple[str, ...]) -> None:
    # Two numbers have one sum in any order, so another way of adding changes no bit.
    flags = (*flags, "--max-steps", "5")
    shared = run_ranks(2, train_in, str(tmp_path / "shared"), flags)
    stock = run_ranks(2, train_without, str(tmp_path / "stock"), flags)
    ways = {name: results[0]["distributed_training"]["gradients"] for name, results in (("a", shared), ("b", stock))}
    assert ways == {"a": "shared memory", "b": "gloo"}
    if "--clip-norm" not in flags:
        assert shared[0]["weights_sha256"] == stock[0]["weights_sha256"]
        assert step_losses(tmp_path / "shared") == step_losses(tmp_path / "stock")
    else:
        # Except for the norm, which is added in parts here and in buckets there, and therefore clipping.
        assert step_losses(tmp_path / "shared") == pytest.approx(step_losses(tmp_path / "stock"), abs=1e-6)


def start_with_different_weights(num_classes: int, input_shape: tuple[int, ...]) -> torch.nn.Module:
    """A model with different initial weights in every process."""
    torch.seed()
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, num_classes))


def test_ranks_start_with_equal_weights_even_if_their_models_differ(tmp_path: Path) -> None:
    flags = ("--model-name", "parallel.test_node_sum:start_with_different_weights", "--max-steps", "3")
    first, second = run_ranks(2, train_in, str(tmp_path), flags)
    assert first["weights_sha256"] == second["weights_sha256"]


def load(world: World, dataset: str, size: str) -> tuple[bool, bool, str]:
    config = DataConfig(dataset=dataset, input_size=size, num_samples=1000)
    data = load_once_per_node(config, 7, world, lambda text: gather_texts(text, world))
    alone = load_dataset(config, 7)
    is_equal = data.fingerprint() == alone.fingerprint() and data.info == alone.info
    for part, other in ((data.train, alone.train), (data.test, alone.test)):
        everything = torch.arange(len(other))
        is_equal &= torch.equal(part.read(everything), other.read(everything)) and torch.equal(
            part.labels, other.labels
        )
    gather_texts("", world)
    if world.rank == 0:
        data.train.labels[0] = 1234
    gather_texts("", world)
    return is_equal, int(data.train.labels[0]) == 1234, ""


@pytest.mark.parametrize(("dataset", "size"), [("synthetic", "20"), ("synthetic", "3x9x7"), ("shapes", "784")])
def test_a_node_has_one_copy_of_its_data(dataset: str, size: str) -> None:
    assert [answer[:2] for answer in run_ranks(2, load, dataset, size)] == [(True, True)] * 2


def load_without(world: World) -> tuple[bool, bool, str]:
    os.environ[SWITCH] = "off"
    return load(world, "synthetic", "20")


def test_without_shared_memory_every_rank_has_a_copy() -> None:
    # Otherwise the test above would prove nothing.
    assert run_ranks(2, load_without) == [(True, True, ""), (True, False, "")]


def load_on_uneven_nodes(world: World) -> bool:
    """Rank 0 is alone on its node, ranks 1 and 2 share one."""
    local_rank, local_ranks, host = [(0, 1, "one"), (0, 2, "other"), (1, 2, "other")][world.rank]
    place = World(world.rank, 3, local_rank, local_ranks, "the test", host, "cpu", "gloo", 1)
    config = DataConfig(dataset="synthetic", input_size="20", num_samples=1000)
    data = load_once_per_node(config, 7, place, partial(gather_texts, world=world))
    assert data.fingerprint() == load_dataset(config, 7).fingerprint()
    assert open_node_sum(10, place) is None
    gather_texts("", world)
    if world.rank == 1:
        data.train.labels[0] = 1234
    gather_texts("", world)
    return int(data.train.labels[0]) == 1234


def test_nodes_of_different_sizes_share_data() -> None:
    assert run_ranks(3, load_on_uneven_nodes) == [False, True, True]


def own_memory_mb() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))


def grow(world: World) -> float:
    """The private memory of a rank for 53 MB of samples."""
    exchange = partial(gather_texts, world=world)
    load_once_per_node(DataConfig(dataset="synthetic", input_size="64", num_samples=1000), 7, world, exchange)
    before = own_memory_mb()
    data = load_once_per_node(DataConfig(dataset="synthetic", input_size="64", num_samples=200_000), 7, world, exchange)
    data.train.read(torch.arange(0, 200_000, 10))
    return own_memory_mb() - before


def test_more_samples_need_no_more_private_memory() -> None:
    # The rank that creates the samples frees its memory, except for what its allocator keeps.
    first, second = run_ranks(2, grow)
    assert first < 15
    assert second < 10


def allocate_and_free(world: World) -> int:
    for _ in range(3):
        opened(10_000, world)
        gc.collect()
    links = [file for file in Path("/proc/self/fd").iterdir() if file.is_symlink()]  # one less: that of this list
    return sum("memfd:paceline" in str(link.readlink()) for link in links)


def test_unused_shared_memory_is_freed() -> None:
    assert run_ranks(2, allocate_and_free) == [0, 0]


def load_nothing(world: World) -> str:
    try:
        load_once_per_node(
            DataConfig(dataset="cifar10", data_dir="/nowhere"), 7, world, lambda t: gather_texts(t, world)
        )
    except Exception as error:
        return type(error).__name__
    return "loaded"


def test_a_first_rank_without_data_does_not_block_the_others() -> None:
    first, second = run_ranks(2, load_nothing)
    assert first == second == "DataError"


def test_one_rank_or_several_nodes_use_no_shared_memory() -> None:
    assert open_node_sum(10, make_world(0, 1)) is None
    assert open_node_sum(10, World(0, 4, 0, 2, "the test", "testhost", "cpu", "gloo", 1)) is None
