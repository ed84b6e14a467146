"""`results.json`: what came out of a run, from all ranks."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoints.capture import gather_whole, model_tensors, optimizer_tensors
from paceline.metrics.throughput import read_memory
from paceline.parallel.collectives import gather_texts
from paceline.parallel.parts import bits
from paceline.runtime.detect import World
from paceline.training.components import Components
from paceline.training.evaluate import Evaluation
from paceline.training.limits import find_limits
from paceline.training.state import TrainState


@dataclass(frozen=True)
class RunTotals:
    """Of this attempt, on this rank."""

    seconds: float  # from the first step to the last checkpoint, evaluation included
    stepping_s: float  # to the last step
    samples: int
    wait_s: float
    timing: dict[str, Any]  # where the steps' time went: metrics/phases.py
    energy_j: float | None  # of this rank's GPU, where its driver tells


def hash_tensors(tensors: dict[str, Tensor]) -> str:
    """SHA-256 of the tensors' bytes in the order of their names."""
    digest = hashlib.sha256()
    for _, tensor in sorted(tensors.items()):
        digest.update(bits(tensor).contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def hash_model(model: nn.Module) -> str:
    """Of everything in the state of a model that is not sharded."""
    return hash_tensors(gather_whole(model_tensors(model), "cpu"))


def hash_state(components: Components, device: str) -> dict[str, str]:
    """Hashes of the final weights and, for an exact run, of the optimizer's state too. Collective under FSDP."""
    module = components.model.module
    hashes = {"weights_sha256": hash_tensors(gather_whole(model_tensors(module), device))}
    if components.plan.config.parallel.exact:
        state = optimizer_tensors(module, components.optimizer)
        hashes["optimizer_sha256"] = hash_tensors(gather_whole(state, device))
    return hashes


def gather_ranks(world: World, totals: RunTotals) -> list[dict[str, Any]]:
    """One entry per rank, on every rank. Collective."""
    memory = read_memory(world.device)
    mine = {
        "rank": world.rank,
        "host": world.host,
        "device": world.device,
        "threads": world.threads,
        "samples": totals.samples,
        "seconds": totals.seconds,
        "seconds_to_last_step": totals.stepping_s,
        "samples_per_second": totals.samples / max(totals.seconds, 1e-9),
        "data_wait_seconds": totals.wait_s,
        "peak_memory_mb": memory.peak_mb,
        "energy_joules": totals.energy_j,
        **totals.timing,
    }
    return [json.loads(text) for text in gather_texts(json.dumps(mine), world)]


def make_results(
    components: Components,
    world: World,
    state: TrainState,
    test: Evaluation,
    final_train: dict[str, Any],
    ranks: list[dict[str, Any]],
    hashes: dict[str, str],
) -> dict[str, Any]:
    """Collective: the devices' own limits may be measured on the way."""
    plan, profiler = components.plan, components.step.guards.profiler
    seconds = max(entry["seconds"] for entry in ranks)
    samples = sum(entry["samples"] for entry in ranks)
    return {
        "status": "finished",
        "test_accuracy": test.accuracy,
        "test_loss": test.loss,
        "test_metrics": test.metrics,
        "best_epoch": state.best_epoch,
        "best_validation_accuracy": state.best_accuracy if state.best_epoch else None,
        "steps": state.step,
        "samples_seen": state.step * plan.config.train.global_batch_size,
        "samples_per_second": samples / max(seconds, 1e-9),
        "training_seconds": seconds,
        "world_size": world.world_size,
        "strategy": components.model.strategy,
        **hashes,
        "distributed_training": {
            "world_size": world.world_size,
            "backend": world.backend,
            "gradients": components.step.exchange,
            "global_batch_size": plan.config.train.global_batch_size,
            "rank_batch_size": plan.rank_batch_size,
            "epochs": plan.config.train.epochs,
            "learning_rate": plan.peak_lr,
            "precision": str(components.model.autocast_dtype or "torch.float32").removeprefix("torch."),
        },
        "performance": {
            "avg_final_loss": final_train.get("loss"),
            "avg_final_accuracy": final_train.get("accuracy"),
            "total_samples_processed": samples,
            "samples_per_second": samples / max(seconds, 1e-9),
            "time_per_epoch": final_train.get("seconds"),
        },
        "process_metrics": ranks,
        "limits": find_limits(components, world, ranks),
        **({"profile": profiler.result.to_json() if profiler.result else None} if profiler else {}),
        "model_info": {
            "name": plan.config.model.model_name,
            "parameters": components.num_parameters,
            "input_shape": list(plan.input_shape),
            "classes": list(plan.info.classes),
        },
        "test": {
            "samples": test.samples,
            "class_accuracy": dict(zip(plan.info.classes, test.class_accuracy(), strict=True)),
            "confusion_matrix": test.confusion,
        },
        "success": True,
    }
