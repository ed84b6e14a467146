"""`paceline bench` with real ranks and tiny sizes. Speeds must be positive; sums, shapes and exit codes are exact."""

from __future__ import annotations

import gzip
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.cli import assert_nothing_starts, command, paceline
from harness.processes import seconds_until_empty, started
from harness.ranks import make_world, run_ranks
from paceline.metrics.ceiling import measure_matmul_flops
from paceline.metrics.screen import format_flops, format_size, format_time
from paceline.metrics.timing import Rounds
from paceline.runtime.detect import World
from paceline.settings.schema import Config, DataConfig, ParallelConfig
from paceline.tools.bench.collectives import (
    OPERATIONS,
    Exchange,
    Fit,
    Row,
    bucket_size_mb,
    bus_factor,
    fit_line,
    measure,
)
from paceline.tools.bench.limits import find_link, measure_copy_bandwidth, network_link, read_nvlink, read_pcie
from paceline.tools.bench.request import parse_sizes
from paceline.tools.bench.session import judge_step, judge_sums
from paceline.tools.bench.step import Blocks, StepResult

TINY = ["--num-samples=160", "--global-batch-size=16", "--seconds-per-size=0.01"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All parts on two ranks: traces, JSON on the screen and in a file."""
    folder = tmp_path_factory.mktemp("bench")
    flags = ["--processes=2", "--sizes=1KB:4KB", "--profile=traces", "--json", "--output=kept.json"]
    answer = paceline("bench", "shapes-cnn", *TINY, *flags, cwd=folder)
    assert (answer.code, answer.err) == (0, "")
    (folder / "printed.json").write_text(answer.out)
    return folder


@pytest.fixture(scope="module")
def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "printed.json").read_text())
    return found


def test_collectives_are_correct_and_their_bandwidths_are_consistent(report: dict[str, Any]) -> None:
    rows = report["collectives"]["rows"]
    assert [(row["operation"], row["size_bytes"]) for row in rows] == [(o, s) for o in OPERATIONS for s in (1024, 4096)]
    for row in rows:
        assert row["is_right"] is True
        assert row["rounds"] >= 3
        assert 0 < row["median_s"] <= row["p95_s"]
        assert row["algorithm_bytes_per_s"] == row["size_bytes"] / row["median_s"]
        factor = 1.0 if row["operation"] == "all-reduce" else 0.5  # on two ranks
        assert row["bus_bytes_per_s"] == row["algorithm_bytes_per_s"] * factor
    assert [fit["operation"] for fit in report["collectives"]["fits"]] == list(OPERATIONS)
    assert all(fit["latency_s"] >= 0 for fit in report["collectives"]["fits"])


def test_the_limit_of_local_ranks_is_the_measured_copy(report: dict[str, Any]) -> None:
    limits = report["limits"]
    assert limits["copy_bytes_per_s"] > 0
    assert limits["link"]["bytes_per_s"] == limits["copy_bytes_per_s"]
    assert limits["link"]["is_measured"] is True
    assert limits["link"]["name"].startswith("memory copy on this machine, 2 ranks at once")


def test_data_and_step_are_consistent(report: dict[str, Any]) -> None:
    data, step = report["data"], report["step"]
    assert data["rank_batch_size"] == step["rank_batch_size"] == 8
    assert min(data[name] for name in ("batch_s", "order_s", "samples_per_s", "bytes_per_s")) > 0
    assert data["of_copy"] == data["bytes_per_s"] / limits_copy(report)
    assert min(step[name] for name in ("step_s", "loop_s", "forward_s", "backward_s", "update_s", "alone_s")) > 0
    assert step["samples_per_s"] == 16 / step["step_s"]
    assert min(step["exposed_s"], step["data_s"]) >= 0
    assert step["gradient_bytes"] == 4 * step["num_parameters"]
    assert step["mfu"] == step["flops_per_s"] / step["ceiling_flops_per_s"]
    assert (step["precision"], step["note"]) == ("float32", "")


def limits_copy(report: dict[str, Any]) -> float:
    return float(report["limits"]["copy_bytes_per_s"])


def test_the_arithmetic_of_a_step_is_counted(report: dict[str, Any]) -> None:
    """By hand: each layer's products forward and twice backward. The first layer's input has no gradient."""
    first, *others = 9 * 3 * 16 * 32**2, 9 * 16 * 32 * 16**2, 9 * 32 * 64 * 8**2, 64 * 4**2 * 512, 512 * 10
    assert report["step"]["flops"] == 8 * 2 * (2 * first + 3 * sum(others))


def test_the_report_is_complete_and_stored(folder: Path, report: dict[str, Any]) -> None:
    parts = ["collectives", "data", "pictures", "step", "profile", "verdict", "notes"]
    assert list(report) == ["schema", "time", "paceline", "torch", "recipe", "world", "limits", *parts]
    assert report["world"]["world_size"] == 2
    assert report["world"]["launcher"] == "paceline"
    assert report["recipe"] == "shapes-cnn"
    kind = report["verdict"]["kind"]
    assert kind in ("communication-bound", "data-bound", "compute-bound")
    assert report["verdict"]["text"].startswith(f"{kind}: ")
    kept = json.loads((folder / "kept.json").read_text())
    assert {**kept, "time": ""} == {**report, "time": ""}


def test_traces_are_json_with_the_operators_of_training_and_exchange(folder: Path, report: dict[str, Any]) -> None:
    assert report["profile"]["files"] == ["rank-0.json.gz", "rank-1.json.gz"]
    assert sorted(path.name for path in (folder / "traces").iterdir()) == report["profile"]["files"]
    for file in report["profile"]["files"]:
        with gzip.open(folder / "traces" / file) as trace:
            names = [event.get("name") for event in json.load(trace)["traceEvents"]]
        assert {"aten::convolution", "aten::convolution_backward"} <= set(names)
        for mark in ("data", "forward", "backward", "reduce", "update"):
            assert names.count(mark) == report["profile"]["steps"] == 10, mark
    top = report["profile"]["top"]
    assert len(top) == 10
    assert [entry["seconds"] for entry in top] == sorted((entry["seconds"] for entry in top), reverse=True)
    assert 0 < sum(entry["share"] for entry in top) <= 1


def test_nothing_else_is_written(folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["kept.json", "printed.json", "traces"]


def test_an_interrupt_ends_at_once_without_orphans(tmp_path: Path) -> None:
    with started("bench", "--processes=2", "--what=collectives", "--seconds-per-size=60", cwd=tmp_path) as bench:
        bench.wait_for("bench     shapes-cnn: 2 ranks by paceline, cpu, gloo")
        assert len(bench.ranks()) == 2
        os.killpg(bench.process.pid, signal.SIGINT)  # like a terminal on Ctrl-C
        assert bench.wait(timeout_s=10) == 130
        assert bench.err == "\ninterrupted\n"
        seconds_until_empty(tmp_path, limit_s=10)


def test_bench_joins_the_ranks_of_torchrun_and_prints_one_table(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "paceline", "bench"]
    flags = ["--what=collectives", "--sizes=1KB:4KB", "--seconds-per-size=0.01", "--device=cpu"]
    answer = command(*torchrun, *flags, cwd=tmp_path)
    assert answer.code == 0, answer
    lines = answer.out.splitlines()
    assert lines[0].startswith("bench     shapes-cnn: 2 ranks by torchrun, cpu, gloo")
    table = lines[lines.index("") :]
    assert [line.split()[:2] for line in table[3:5]] == [["1", "KB"], ["4", "KB"]]
    assert answer.out.count("COLLECTIVES") == 1
    assert "memory copy on this machine, 2 ranks at once" in answer.out
    assert lines[-1].startswith("links: all-reduce reaches ")
    assert list(tmp_path.iterdir()) == []


WRONG = {
    "unknown part": (["--what", "collectives,speed"], ["what: 'speed' is not valid", "collectives, data, step"]),
    "no part": (["--what=,"], ["what: '' is not valid"]),
    "part without value": (["--what"], ["--what needs a value"]),
    "not a size": (["--sizes", "big"], ["sizes: 'big' is not valid", "--sizes 4KB:64MB"]),
    "no size": (["--sizes=0:4KB"], ["sizes: '0:4KB'"]),
    "too large": (["--sizes=4KB:9GB"], ["up to 8 GB"]),
    "reversed": (["--sizes", "1MB:4KB"], ["reversed", "--sizes 4KB:1MB"]),
    "seconds": (["--seconds-per-size", "nan"], ["seconds_per_size is out of range", "from 0.01 up to 60"]),
    "indivisible": (["--processes", "3"], ["256 is not divisible by 3"]),
    "alone": (["--what=collectives", "--processes=1"], ["collectives need two ranks or more"]),
    "not a number": (["--what=collectives", "--processes=many"], ["processes: 'many'"]),
    "an unknown flag": (["--epoch", "2"], ["unknown flag '--epoch'"]),
    "json with a value": (["--json=yes"], ["--json takes no value"]),
    "output into nowhere": (["--output=nowhere/bench.json"], ["no such folder"]),
    "profile into a file": ([f"--profile={__file__}"], ["the folder for traces is a file"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_starts_no_bench(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    flags, parts = WRONG[case]
    assert_nothing_starts(capsys, tmp_path, ["bench", "shapes-cnn", *flags], *parts)


# --- Functions that other modules call


def measured(world: World) -> list[Row]:
    return measure(world, [4, 1000], seconds_per_size=0.01)


def test_three_ranks_measure_messages_that_do_not_divide_evenly() -> None:
    for rows in run_ranks(3, measured):
        assert [row.size_bytes for row in rows] == [12, 1008] * 3  # rounded up to equal parts of integers
        assert all(row.is_right and row.median_s > 0 for row in rows)
    assert [bus_factor(operation, 3) for operation in OPERATIONS] == [4 / 3, 2 / 3, 2 / 3]


class _Corrupt(Exchange):
    """Changes one number on one rank."""

    def run(self) -> None:
        super().run()
        if self._world.rank == 1:
            (self._part if self._operation == "reduce-scatter" else self._whole)[-1] += 1


def checked(world: World) -> list[bool]:
    return [kind(operation, 64, world).check() for operation in OPERATIONS for kind in (Exchange, _Corrupt)]


def test_one_wrong_number_is_detected() -> None:
    assert run_ranks(2, checked) == [[True, True] * 3, [True, False] * 3]


def test_wrong_sums_are_reported_before_any_speed() -> None:
    good = Row("all-reduce", 4096, 5, 1e-3, 1e-3, 1.0, 1.0, is_right=True)
    assert judge_sums([good]) is None
    verdict = judge_sums([good, replace(good, operation="all-gather", is_right=False)])
    assert verdict is not None
    assert verdict.kind == "wrong-sums"
    assert "all-gather of 4 KB" in verdict.text


def test_limits_of_this_machine_are_positive() -> None:
    assert measure_copy_bandwidth("cpu") > 0
    assert measure_matmul_flops("cpu", torch.float32) > 0
    assert find_link(make_world(0, 1), 1.0) is None


def test_a_line_is_recovered_from_its_points() -> None:
    sizes = [4096, 65536, 2**20, 2**26]
    latency, bandwidth = fit_line(sizes, [2e-4 + size / 1e9 for size in sizes])
    assert latency == pytest.approx(2e-4)  # least squares in floating point
    assert bandwidth == pytest.approx(1e9)
    assert fit_line([1.0, 2.0], [4e-4, 2e-4])[1] is None


def test_sizes_and_units() -> None:
    assert parse_sizes("4KB:64MB") == tuple(4096 * 4**power for power in range(8))
    assert parse_sizes("1kb:5 KiB") == (1024, 4096, 5120)
    assert parse_sizes("16MB") == (2**24,)
    assert [format_size(size) for size in (12, 4096, 3 * 2**19)] == ["12 B", "4 KB", "1.5 MB"]
    assert [format_time(seconds) for seconds in (1.5e-5, 0.0999999, 2.0)] == ["15.0 us", "100 ms", "2.00 s"]
    assert [format_flops(flops) for flops in (62.5e9, 756e12)] == ["62.5 GFLOP/s", "756 TFLOP/s"]
    rounds = Rounds(tuple(float(number) for number in range(1, 101)))
    assert (rounds.median_s, rounds.p95_s) == (50.5, 95.0)


def test_a_difference_is_measured_between_neighbouring_blocks() -> None:
    """A machine that is three times as slow for a while changes nothing."""
    slower = Blocks(tuple(Rounds((seconds, seconds)) for seconds in (3.0, 9.0, 3.0)))
    faster = Blocks(tuple(Rounds((seconds, seconds)) for seconds in (2.0, 6.0, 2.0)))
    assert slower.longer_than(faster) == 1.0
    assert faster.longer_than(slower) == 0.0
    assert slower.all.median_s == 3.0


def test_link_speeds_are_read_from_fake_nvidia_smi_answers() -> None:
    nvlink = read_nvlink(
        "GPU 0: NVIDIA (UUID: x)\n\t Link 0: 26.562 GB/s\n\t Link 1: 26.562 GB/s\n\t Link 2: <inactive>\n"
    )
    assert nvlink is not None
    assert (nvlink.bytes_per_s, nvlink.name) == (53.124e9, "NVLink, 2 links, nominal")
    pcie = read_pcie("4, 16\n")
    assert pcie is not None
    assert pcie.name == "PCIe 4.0 x16, nominal"
    assert read_nvlink("") is read_pcie("[N/A], [N/A]\n") is None


def test_network_speeds_are_read_from_a_fake_sysfs(tmp_path: Path) -> None:
    for name, state, speed in (
        ("eth0", "up", "10000"),
        ("eth1", "up", "-1"),
        ("eth2", "down", "100000"),
        ("lo", "up", "9"),
    ):
        (tmp_path / "net" / name).mkdir(parents=True)
        (tmp_path / "net" / name / "operstate").write_text(f"{state}\n")
        (tmp_path / "net" / name / "speed").write_text(f"{speed}\n")
    ethernet = network_link(is_nccl=False, net=tmp_path / "net", infiniband=tmp_path / "none")
    assert (ethernet.bytes_per_s, ethernet.name) == (1.25e9, "network interface eth0, 10 Gbit/s, nominal")
    unknown = network_link(is_nccl=True, net=tmp_path / "nothing", infiniband=tmp_path / "none")
    assert unknown.bytes_per_s is None
    port = tmp_path / "infiniband" / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    fabric = network_link(is_nccl=True, net=tmp_path / "net", infiniband=tmp_path / "infiniband")
    assert (fabric.bytes_per_s, fabric.name) == (50e9, "InfiniBand mlx5_0, 400 Gbit/s, nominal")


STEP = StepResult(
    steps=10,
    rank_batch_size=8,
    precision="float32",
    num_parameters=10,
    gradient_bytes=2**20,
    step_s=0.1,
    step_p95_s=0.1,
    samples_per_s=160.0,
    loop_s=0.1,
    data_s=0.0,
    forward_s=0.04,
    backward_s=0.05,
    update_s=0.01,
    alone_s=0.1,
    exposed_s=0.0,
    flops=10**9,
    flops_per_s=1e10,
    ceiling_flops_per_s=4e10,
)


def test_the_verdict_names_the_part_with_the_most_time() -> None:
    world, config = make_world(0, 2), Config()
    assert judge_step(STEP, config, world, cores=8).text.startswith(
        "compute-bound: 100% of a step is arithmetic, at 25% of the matrix ceiling"
    )
    talking = judge_step(replace(STEP, alone_s=0.06, exposed_s=0.04), config, world, cores=8).text
    assert talking.startswith("communication-bound: 40% of a step (40.0 ms) goes into exchanging 1 MB of gradients")
    assert "--global-batch-size" in talking
    sharded = Config(parallel=ParallelConfig(strategy="fsdp"))
    assert "--strategy ddp" in judge_step(replace(STEP, exposed_s=0.04), sharded, world, cores=8).text
    folder = Config(data=DataConfig(dataset="folder", num_workers=3))
    waiting = judge_step(replace(STEP, data_s=0.1, exposed_s=0.01), folder, world, cores=8).text
    assert waiting == (
        "data-bound: 50% of a step (100 ms) waits for its batch; "
        "try more --num-workers than 3, or pack the pictures once (paceline data pack)"
    )
    on_gpu = judge_step(replace(STEP, flops_per_s=1e9), config, replace(world, device="cuda:0"), cores=8).text
    advice = on_gpu.rpartition("; try ")[2]
    places = [advice.find(option) for option in ("--no-amp", "--compile always", "--global-batch-size")]
    assert min(places) >= 0
    assert places == sorted(places)


def test_the_bucket_of_which_a_tenth_is_latency() -> None:
    fits = [Fit("all-gather", 1.0, 1.0), Fit("all-reduce", 1e-3, 2e9)]
    size_mb = bucket_size_mb(fits, 4)
    assert size_mb is not None
    seconds = 1e-3 + size_mb * 2**20 * bus_factor("all-reduce", 4) / 2e9
    assert 0.09 < 1e-3 / seconds <= 0.1
    assert bucket_size_mb([Fit("all-reduce", 0.0, 2e9)], 4) == 1
    assert bucket_size_mb([Fit("all-reduce", 1.0, 2e9)], 4) == 200
    assert bucket_size_mb([Fit("all-reduce", 1e-3, None)], 4) is None
    assert bucket_size_mb(fits, 1) is None
    assert bucket_size_mb([], 4) is None
