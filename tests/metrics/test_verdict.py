"""What limited a run: every kind with its text and advice, counted arithmetic, and the stored ceiling."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.pages import write_run
from harness.ranks import make_world, run_ranks
from harness.runs import quick_config
from paceline.cli.main import main
from paceline.metrics import ceiling as ceiling_module
from paceline.metrics.ceiling import (
    NOTHING_TO_COUNT,
    cache_file,
    conditions_of,
    count_flops,
    find_ceilings,
    recall,
    remember,
)
from paceline.metrics.compile_gain import Gain
from paceline.metrics.verdict import Conditions, RankTime, RunVerdict, Speed, judge_run, split_time
from paceline.parallel.collectives import wait_for_all
from paceline.reports.run_page import write_run_page
from paceline.runtime.detect import World
from paceline.settings.schema import Config, DataConfig, ModelConfig, ParallelConfig, RunConfig, TrainConfig
from paceline.training.components import build_components
from paceline.training.limits import TOO_SHORT, WORTH_MEASURING_S, find_limits

CPU = Conditions(Config(), make_world(0, 2), "ddp", "float32", cores=2, step_ms=100.0)
GPU = replace(CPU, world=replace(CPU.world, device="cuda:0", backend="nccl"), precision="bfloat16", is_compiled=True)
DENSE = Speed(50e12, 100e12)


def ranks(*times: tuple[float, float, float | None]) -> list[RankTime]:
    """Ranks with these (step, data, communication) times in milliseconds."""
    return [RankTime(number, f"node{number}", *values) for number, values in enumerate(times)]


def judged(times: list[RankTime], conditions: Conditions = GPU, speed: Speed = DENSE) -> RunVerdict:
    return judge_run(split_time(times), speed, conditions)


# --- Time of each part


def test_a_slow_rank_is_distinguished_from_slow_links() -> None:
    """Steps of 100 ms. Rank 2 works for 90 ms, the others for 60: they wait for it, not for the link."""
    shares = split_time(ranks((100, 5, 40), (100, 5, 40), (100, 5, 10)))
    assert shares.communication == pytest.approx(0.3)  # sums of decimal fractions
    assert shares.exchange == pytest.approx(0.1)
    assert shares.slowest is not None
    assert (shares.slowest.rank, shares.slowest.times_slower, shares.slowest.is_data) == (2, 1.5, False)
    assert shares.slowest.lost_share == pytest.approx(0.3)
    assert shares.slowest_to_fastest == 1.5


def test_one_rank_never_waits_and_unknown_waits_stay_unknown() -> None:
    alone = split_time(ranks((100, 25, 0.0)))
    assert (alone.data, alone.communication, alone.slowest, alone.computing) == (0.25, 0.0, None, 0.75)
    sharded = split_time(ranks((100, 10, None), (100, 10, None)))
    assert (sharded.communication, sharded.exchange, sharded.slowest_to_fastest) == (None, None, None)


# --- Every kind


def test_compute_bound() -> None:
    found = judged(ranks((100, 1, 2), (100, 1, 2)), speed=Speed(493e12, 694e12))
    assert found.kind == "compute-bound"
    assert found.line == (
        "compute-bound: 71% of the matrix ceiling (493 TFLOP/s of 694), data wait 1%, exchange 2%;"
        " next: more or faster GPUs: this one is nearly fully used"
    )
    assert found.to_json() == {"kind": "compute-bound", "text": found.text, "try": found.tip, "unused": []}


def test_input_bound() -> None:
    found = judged(ranks((100, 38, 5), (100, 38, 5)))
    assert found.kind == "input-bound"
    assert re.findall(r"\d[\d.]*", found.text) == ["38", "50", "50.0", "100"]  # waiting, share of the ceiling, TFLOP/s


def test_communication_bound() -> None:
    found = judged(ranks((100, 3, 31), (100, 3, 35)))
    assert found.kind == "communication-bound"
    assert re.findall(r"\d+", found.text) == ["31", "3"]  # exchange that is not hidden, waiting for data


def test_straggler_is_named_with_its_host() -> None:
    found = judged(ranks((100, 5, 40), (100, 5, 40), (100, 5, 10)))
    assert found.kind == "straggler"
    assert found.text.startswith("straggler: rank 2 on node2 takes 1.5 times the others' time for its own work")
    assert "node2" in found.tip
    reading = judged(ranks((100, 5, 40), (100, 5, 40), (100, 30, 10)))
    assert (reading.kind, "reads its data" in reading.tip) == ("straggler", True)


def test_low_arithmetic_without_waits_is_overhead() -> None:
    found = judged(ranks((8, 0.1, 0.2), (8, 0.1, 0.2)), replace(GPU, step_ms=8.0), Speed(9e12, 100e12))
    assert found.kind == "overhead"
    assert found.text == (
        "overhead: 9% of the matrix ceiling (9.00 TFLOP/s of 100) though data wait 1%, exchange 2%:"
        " much of a step is not matrix arithmetic"
    )
    assert found.tip == (
        "a larger --global-batch-size (small operators are dominated by launch overhead),"
        " or --profile, to see which operators"
    )
    idle = judged(ranks((8, 0, 0)), replace(GPU, step_ms=8.0, host_overhead_share=0.4), Speed(9e12, 100e12))
    assert idle.text.endswith("and the GPU waits 40% of it for its host")


def test_waits_do_not_count_as_overhead() -> None:
    """24 % of the ceiling in the 70 % of the time that is computation is enough."""
    times = ranks((100, 15, 15), (100, 15, 15))
    assert judged(times, speed=Speed(24e12, 100e12)).kind == "compute-bound"
    assert judged(times, speed=Speed(20e12, 100e12)).kind == "overhead"


def test_the_largest_loss_decides() -> None:
    assert judged(ranks((100, 25, 30), (100, 25, 30))).kind == "communication-bound"
    assert judged(ranks((100, 30, 25), (100, 30, 25))).kind == "input-bound"
    assert judged(ranks((100, 19, 19), (100, 19, 19))).kind == "compute-bound"


def test_without_a_ceiling_the_reason_is_given_and_overhead_is_not_reported() -> None:
    found = judged(ranks((100, 1, 0)), speed=Speed(1e12, None, "the run was too short to measure the matrix ceiling"))
    assert found.text == (
        "compute-bound: 99% of a step is computing (the run was too short to measure the matrix ceiling), data wait 1%"
    )
    sharded = judged(ranks((100, 1, None), (100, 1, None)))
    assert sharded.text.endswith("data wait 1%, exchange not measured separately")


# --- The advice is right for the run


def with_train(conditions: Conditions, **values: Any) -> Conditions:
    return replace(conditions, config=replace(conditions.config, train=TrainConfig(**values)))


WAITING, TALKING, QUICK = ranks((100, 40, 0)), ranks((100, 1, 40), (100, 1, 40)), ranks((100, 1, 1), (100, 1, 1))


def test_a_short_run_names_what_it_did_not_use() -> None:
    """`--compile auto` does not compile a run of 12 seconds. Its verdict does not say that nothing is left to gain."""
    gain = Gain(0.31, 20.0, is_measured=True)
    found = judged(QUICK, replace(GPU, is_compiled=False, compile_gain=gain))
    assert "nearly fully used" not in found.tip
    (option,) = found.unused
    assert (option.name, option.gain_share) == ("compile", 0.31)
    assert option.pays_from_s == pytest.approx(64.5, abs=0.1)
    assert "31% of a step less (measured), which pays from about 65 s" in found.tip
    assert found.to_json()["unused"] == [vars(option)]
    # Compiled steps that were no shorter are not advised, and exact runs are not compiled.
    assert not judged(QUICK, replace(GPU, is_compiled=False, compile_gain=Gain(-0.1, 20.0, True))).unused
    exact = Config(parallel=ParallelConfig(exact=True))
    assert not judged(QUICK, replace(GPU, is_compiled=False, config=exact)).unused
    alone = replace(GPU.world, world_size=1, local_world_size=1)
    plain = with_train(replace(GPU, world=alone, is_compiled=False), compile="never")
    assert [option.name for option in judged(QUICK, plain).unused] == ["compile", "recording"]


@pytest.mark.parametrize(
    ("times", "conditions", "speed", "tip"),
    [
        # compute-bound
        (QUICK, GPU, DENSE, "more or faster GPUs: this one is nearly fully used"),
        (
            *(QUICK, with_train(replace(GPU, precision="float32 (tf32)", is_compiled=False), compile="never"), DENSE),
            "mixed precision (leave out --no-amp),"
            " or no --compile never: 25% of a step less (expected), which pays from about 80 s of training",
        ),
        (QUICK, CPU, DENSE, "more cores or a GPU; faster links or disks would not help"),
        (
            *(QUICK, replace(CPU, cores=8), DENSE),
            "the other cores too: 2 of 8 are used (--processes, --omp-num-threads)",
        ),
        (QUICK, replace(CPU, load=6.6), DENSE, "fewer other programs on this machine (load 6.6 on 2 cores)"),
        # overhead
        (QUICK, GPU, Speed(1.0, 100.0), "--profile, to see which operators"),
        (
            *(QUICK, with_train(GPU, accumulate=8, deterministic=True), Speed(1.0, 100.0)),
            "a smaller --accumulate than 8 (larger microbatches), or no --deterministic",
        ),
        (
            *(QUICK, replace(CPU, config=Config(run=RunConfig(profile=True))), Speed(1.0, 100.0)),
            "profile/top.txt, which names the operators",
        ),
        (
            *(QUICK, replace(CPU, config=Config(parallel=ParallelConfig(exact=True, lanes=8))), Speed(1.0, 100.0)),
            "fewer --lanes (each runs by itself), or --profile, to see which operators",
        ),
        # input-bound
        (
            *(WAITING, replace(CPU, cores=8, config=Config(data=DataConfig(dataset="folder", num_workers=3))), DENSE),
            "more --num-workers than 3, or pack the pictures once (paceline data pack)",
        ),
        (
            *(WAITING, replace(CPU, config=Config(data=DataConfig(dataset="folder", num_workers=3))), DENSE),
            "pack the pictures once (paceline data pack)",
        ),
        (
            *(WAITING, replace(CPU, is_packed=True, config=Config(data=DataConfig(dataset="folder"))), DENSE),
            "a faster disk, or enough memory for the packed pictures, or --augment none",
        ),
        (WAITING, CPU, DENSE, "--augment none, or a GPU, which would hold this data set in its own memory"),
        (
            *(WAITING, replace(GPU, config=Config(data=DataConfig(augment="none"))), DENSE),
            "--profile, to see what the pipeline does",
        ),
        # communication-bound
        (TALKING, GPU, DENSE, "a larger --global-batch-size (gradients are exchanged once per step)"),
        (
            *(TALKING, replace(GPU, strategy="fsdp"), DENSE),
            "--strategy ddp if the model fits (sharded weights are exchanged too),"
            " or a larger --global-batch-size (gradients are exchanged once per step)",
        ),
        (
            *(TALKING, CPU, DENSE),
            "a larger --global-batch-size (gradients are exchanged once per step),"
            " or fewer --processes with more threads each",
        ),
    ],
)
def test_advice(times: list[RankTime], conditions: Conditions, speed: Speed, tip: str) -> None:
    assert judged(times, conditions, speed).tip == tip


# --- Arithmetic


def test_the_arithmetic_of_built_in_models_is_counted() -> None:
    """By hand: each product once forward and twice backward. The first layer's input has no gradient."""
    first, second, third = 784 * 256, 256 * 128, 128 * 10
    mlp = count_flops(ModelConfig(model_name="mlp", hidden_size=256), (784,), 10)
    assert mlp.per_sample == 2 * (2 * first + 3 * (second + third))
    for name in ("vgg11", "resnet18"):
        counted = count_flops(ModelConfig(model_name=name), (3, 32, 32), 10)
        assert counted.per_sample is not None
        assert counted.per_sample > 1e8
        assert counted.note == ""


OWN_MODEL = """
import torch
from torch import nn

class Own(nn.Module):
    def __init__(self, classes, looks):
        super().__init__()
        self.layer = nn.Linear(12, classes)
        self.looks = looks

    def forward(self, x):
        x = x.flatten(1)
        if self.looks == "at its numbers" and float(x.sum()) > 1e9:
            x = x * 0
        if self.looks == "for trouble":
            raise ValueError("not\\nwith me")
        return self.layer(x)

def plain(num_classes, input_shape):
    return Own(num_classes, "")

def looks_at_its_numbers(num_classes, input_shape):
    torch.rand(3)
    return Own(num_classes, "at its numbers")

def fails(num_classes, input_shape):
    return Own(num_classes, "for trouble")

def empty(num_classes, input_shape):
    model = Own(num_classes, "")
    model.layer = nn.Sequential(nn.Flatten(), nn.Softmax(1))
    model.scale = nn.Parameter(torch.ones(1))
    model.register_forward_hook(lambda module, given, answer: answer[:, :num_classes] * module.scale)
    return model
"""


def test_a_users_models_are_counted_if_possible(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN_MODEL)
    before = torch.get_rng_state()
    counts = {
        name: count_flops(ModelConfig(model_name=f"{path}:{name}"), (3, 2, 2), 5)
        for name in ("plain", "looks_at_its_numbers", "fails", "empty")
    }
    assert torch.equal(torch.get_rng_state(), before)
    assert counts["plain"].per_sample == counts["looks_at_its_numbers"].per_sample == 2 * 2 * 12 * 5
    assert counts["fails"].per_sample is None
    assert "(ValueError: not)" in counts["fails"].note
    assert counts["empty"].note == NOTHING_TO_COUNT


# --- The ceiling and its file


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    return tmp_path


def test_a_ceiling_is_stored_for_its_conditions_only(cache: Path) -> None:
    world = make_world(0, 2)
    mine = conditions_of(world, torch.float32)
    remember(mine, 5e10)
    assert recall(mine) == 5e10
    assert [path.parent for path in cache.rglob("*.json")] == [cache / "ceilings"]
    others = [
        conditions_of(replace(world, threads=2), torch.float32),
        conditions_of(replace(world, local_world_size=4), torch.float32),
        conditions_of(world, torch.bfloat16),
    ]
    assert [recall(other) for other in others] == [None] * 3


@pytest.mark.parametrize(
    "content", ["", "[1]", "{", '{"flops_per_s": 1e10}', "nan", '{"flops_per_s": -1}', '{"flops_per_s": "x"}']
)
def test_a_damaged_file_is_no_ceiling(cache: Path, content: str) -> None:
    mine = conditions_of(make_world(0, 1), torch.float32)
    remember(mine, 5e10)
    cache_file(mine).write_text(content)
    assert recall(mine) is None
    whole = {**json.loads(json.dumps(mine.__dict__)), "flops_per_s": float("nan")}
    cache_file(mine).write_text(json.dumps(whole))
    assert recall(mine) is None


def test_on_a_read_only_disk_nothing_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file"))
    mine = conditions_of(make_world(0, 1), torch.float32)
    remember(mine, 5e10)
    assert recall(mine) is None


def test_the_user_can_set_the_folder_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mine = conditions_of(make_world(0, 1), torch.float32)
    monkeypatch.delenv("PACELINE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_file(mine).parent == tmp_path / "paceline" / "ceilings"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_file(mine).parent == tmp_path / ".cache" / "paceline" / "ceilings"


def ask_for_ceilings(world: World, folder: str, rates: list[float]) -> list[Any]:
    """With fixed measurements: unknown, measured, stored, exceeded."""
    import os

    os.environ["PACELINE_CACHE"] = folder
    left = iter(rates)
    ceiling_module.measure_matmul_flops = lambda device, dtype: next(left)  # type: ignore[assignment]
    answers = []
    for may_measure, surpassed in ((False, 0.0), (True, 0.0), (True, 0.0), (False, 9.0), (True, 9.0)):
        mine = surpassed if world.rank else 0.0
        answers.append(find_ceilings(world, torch.float32, may_measure=may_measure, surpassed=mine))
        wait_for_all(world)  # like between two runs: it is written
    return answers


def test_two_ranks_agree_on_fake_ceilings(tmp_path: Path) -> None:
    for answers in run_ranks(2, ask_for_ceilings, str(tmp_path), [8.0, 20.0]):
        assert answers == [None, [8.0, 8.0], [8.0, 8.0], None, [20.0, 20.0]]
    (file,) = (tmp_path / "ceilings").iterdir()
    assert json.loads(file.read_text())["flops_per_s"] == 20.0


# --- All parts together


def limits_of_two_ranks(world: World, folder: str, seconds: float) -> dict[str, Any]:
    import os

    os.environ["PACELINE_CACHE"] = folder
    components = build_components(quick_config(), world)
    weights = [parameter.clone() for parameter in components.model.module.parameters()]
    random = torch.get_rng_state()
    phases = {"data": 5.0, "forward": 30.0, "backward": 50.0, "communication": 10.0 * world.rank, "update": 5.0}
    entry = {"host": "h", "seconds": seconds, "steps": 50, "step_ms": {"mean": 100.0}, "breakdown_ms": phases}
    entries = [{**entry, "rank": rank} for rank in range(2)]
    for rank in range(2):
        entries[rank]["breakdown_ms"] = {**phases, "communication": 10.0 * rank}
    limits = find_limits(components, world, entries)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(*pair) for pair in zip(weights, components.model.module.parameters(), strict=True))
    return limits


def test_two_ranks_report_the_same_limits(tmp_path: Path) -> None:
    first, second = run_ranks(2, limits_of_two_ranks, str(tmp_path), WORTH_MEASURING_S)
    assert first == second
    per_sample = first["flops_per_sample"]
    assert first["flops_per_s_by_rank"] == [per_sample * 32 / 0.1] * 2
    assert first["flops_per_s"] == 2 * per_sample * 32 / 0.1
    assert first["mfu"] == first["flops_per_s"] / first["ceiling_flops_per_s"]
    assert (first["data_share"], first["communication_share"], first["exchange_share"]) == (0.05, 0.05, 0.0)
    assert first["verdict"]["kind"] == "straggler"
    assert len(list(tmp_path.rglob("*.json"))) == 1


def test_a_short_run_measures_nothing(tmp_path: Path) -> None:
    for found in run_ranks(2, limits_of_two_ranks, str(tmp_path), 1.0):
        assert (found["flops_per_s"], found["mfu"]) == (None, None)
        assert found["note"] == TOO_SHORT
        assert found["verdict"]["kind"] == "straggler"
    assert list(tmp_path.iterdir()) == []


def test_a_few_steps_give_no_verdict() -> None:
    components, world = build_components(quick_config(), make_world(0, 1)), make_world(0, 1)
    few = {
        "rank": 0,
        "host": "h",
        "seconds": 60.0,
        "steps": 10,
        "step_ms": {"mean": 1.0},
        "breakdown_ms": {"data": 0.1},
    }
    assert find_limits(components, world, [few]) == {"steps": 10, "verdict": None}
    assert find_limits(components, world, [{"rank": 0, "host": "h", "seconds": 60.0}]) == {"steps": 0, "verdict": None}


def test_the_page_shows_the_limits(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    results = json.loads(folder.results.read_text())
    limits = {"steps": 90, "mfu": 0.71, "flops_per_s": 493e12, "ceiling_flops_per_s": 694e12, "data_share": 0.01}
    verdict = judged(QUICK).to_json()
    top = [{"name": "aten::mm", "calls": 40, "seconds": 0.5, "share": 0.6}]
    results |= {"limits": {**limits, "verdict": verdict}, "profile": {"folder": "profile", "steps": 10, "top": top}}
    folder.results.write_text(json.dumps(results))
    page = write_run_page(folder.path).read_text()
    for words in ("71%", "493 TFLOP/s of 694 TFLOP/s", "<strong>compute-bound</strong>: 50% of", "aten::mm", "500 ms"):
        assert words in page, words


def test_compare_shows_the_limits_of_runs_that_have_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    verdict = {"kind": "compute-bound", "text": "", "try": ""}
    for name, limits in (("a", {"steps": 9, "mfu": 0.71, "verdict": verdict}), ("b", {"steps": 9, "verdict": None})):
        folder = write_run(tmp_path / name)
        results = json.loads(folder.results.read_text())
        folder.results.write_text(json.dumps({**results, "limits": limits}))
    main(["compare", str(tmp_path / "a"), str(tmp_path / "b")])
    rows = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    cells = {row[1]: [cell.strip() for cell in row[2:] if cell.strip()] for row in rows if len(row) > 2}
    assert (cells["of the matrix ceiling"], cells["limit"]) == (["71%", "-"], ["compute-bound", "-"])
