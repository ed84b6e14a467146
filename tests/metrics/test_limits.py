"""How close a run comes to the limits of its GPU. Run with `pytest -m gpu`; CI has none."""

from __future__ import annotations

import gzip
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from harness.ranks import make_world
from harness.runs import quick_config
from paceline.metrics.ceiling import measure_matmul_flops
from paceline.metrics.phases import WARMUP_STEPS, PhaseClock
from paceline.metrics.profile import StepProfiler
from paceline.runs.folder import RunFolder
from paceline.runs.place import RunPlace
from paceline.training import limits
from paceline.training.guards import Guards
from paceline.training.loop import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_ceiling_takes_less_than_a_second(dtype: torch.dtype) -> None:
    torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")  # after training, this is done already
    began = time.perf_counter()
    assert measure_matmul_flops("cuda:0", dtype) > 1e12
    assert time.perf_counter() - began < 1.0


@pytest.mark.parametrize("compile_flag", ["--compile=auto", "--compile=never"])
def test_a_profiled_run_reports_its_limits_and_the_load_of_the_gpu(
    compile_flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(limits, "WORTH_COUNTING_S", 0.0)
    monkeypatch.setattr(limits, "WORTH_MEASURING_S", 0.0)
    world = replace(make_world(0, 1), device="cuda:0", backend="nccl")
    folder = RunFolder(tmp_path / "run")
    folder.create()
    guards = Guards(profiler=StepProfiler(world, folder, lambda step: None))
    config = quick_config("--model-name=resnet18", "--num-samples=4480", "--device=cuda", compile_flag)
    results = train(config, world, RunPlace(folder.path, None), guards).to_json()  # two epochs of 63 steps
    found = results["limits"]
    assert found["precision"] == "bfloat16"
    assert found["ceiling_flops_per_s"] > 1e12
    assert 0 < found["mfu"] < 1
    assert 0 <= found["host_overhead_share"] < 1
    assert results["profile"]["steps"] == 10
    assert sum(operator["seconds"] for operator in results["profile"]["top"]) > 0
    with gzip.open(folder.path / "profile" / "rank-0.json.gz") as trace:
        kinds = {event.get("cat") for event in json.load(trace)["traceEvents"]}
    assert "kernel" in kinds
    (file,) = (tmp_path / "cache" / "ceilings").iterdir()
    assert json.loads(file.read_text())["device"] == torch.cuda.get_device_name(0)
    print(json.dumps({**found, "profile": results["profile"]}, indent=1))


def test_phases_are_timed_on_the_gpu_and_no_step_waits_for_its_update() -> None:
    clock, cycles = PhaseClock("cuda:0"), 5_000_000  # a few milliseconds
    for _ in range(WARMUP_STEPS + 20):
        clock.enter("data")
        clock.enter("forward")
        torch.cuda._sleep(cycles)
        torch.cuda.synchronize()  # the loss is read
        clock.enter("update")
        torch.cuda._sleep(3 * cycles)
        updated = torch.cuda.Event()
        updated.record()
        clock.enter("evaluate")
        assert not updated.query()
    shown = clock.summary()
    breakdown = shown["breakdown_ms"]
    assert breakdown["forward"] > 1
    assert breakdown["update"] == pytest.approx(3 * breakdown["forward"], rel=0.1)  # the speed of the GPU varies
    assert abs(breakdown["other"]) < 0.1 * shown["step_ms"]["mean"]  # between the clocks of the host and the GPU
