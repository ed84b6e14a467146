"""Writes the receipt of a finished run. `paceline verify` makes the same links again and compares them."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import paceline
from paceline.checkpoints.identity import SILENT
from paceline.checkpoints.ledger import read_ledger
from paceline.data.loader import Loader
from paceline.runs.environment import versions_of_packages
from paceline.runs.folder import RunFolder, write_json
from paceline.runs.receipt import hash_file, hash_package, make_receipt
from paceline.settings.samples import excluded_ids
from paceline.settings.schema import Config, flatten
from paceline.training.components import Components
from paceline.training.plan import RunPlan
from paceline.training.results import Results
from paceline.training.session import TrainingSession

_log = logging.getLogger("paceline")
# Where a run writes and reads does not change what it computes, and a copy of the run is elsewhere.
_LEFT_OUT = {*SILENT, "output_dir", "data_dir", "init_from", "device", "num_workers"} - {"max_steps", "inject"}


def try_to_write_receipt(session: TrainingSession, results: Results) -> None:
    """A full disk does not end a finished run."""
    folder = session.folder
    try:
        contents = {
            "config": config_link(session.config),
            "code": code_link(session.components),
            "packages": {"python": platform.python_version(), **versions_of_packages()},
            "machine": machine_link(session.world.device, results),
            "data": data_link(session.components),
            "order": order_link(session.components.train_data, session.components.plan),
            "checkpoints": read_ledger(folder.ledger),
            "metrics": metrics_link(folder),
            "results": results_link(folder, results.to_json()),
        }
        write_json(folder.receipt, make_receipt(folder.path.resolve().name, contents))
    except OSError as error:
        _log.warning("warning: receipt.json cannot be written: %s", error.strerror)


def config_link(config: Config) -> dict[str, Any]:
    """Every setting that decides what is computed."""
    values = {name: value for name, value in flatten(config).items() if name not in _LEFT_OUT}
    plain: dict[str, Any] = json.loads(json.dumps(values))
    return plain


def code_link(components: Components) -> dict[str, Any]:
    functions = {item.name: digest for item, digest in components.code.items()}
    return {"paceline": paceline.__version__, "source_sha256": hash_package(), "functions": functions}


def machine_link(device: str, results: Results) -> dict[str, Any]:
    return {
        **describe_processor(device),
        "ranks": results.world.world_size,
        "lanes": results.plan.lanes if results.plan.config.parallel.exact else 0,
        "threads": results.world.threads,
    }


def describe_processor(device: str) -> dict[str, str]:
    """What decides the bits of a sum: the type of the processor and its vector instructions."""
    if device.startswith("cuda"):
        return {"processor": torch.cuda.get_device_name(device), "instructions": str(torch.version.cuda)}
    return {"processor": _name_of_cpu(), "instructions": torch.backends.cpu.get_cpu_capability()}


def _name_of_cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def data_link(components: Components) -> dict[str, Any]:
    found = components.data.to_json()
    return {name: found[name] for name in ("fingerprint", "split", "accepted")}


def order_link(data: Loader, plan: RunPlan) -> dict[str, Any]:
    """Which samples are trained on, and the order of the first and of the last epoch.

    The orders of all other epochs follow from the same function of (seed, epoch).
    """
    last_epoch, inside = plan.clock.locate(plan.last_step)
    last_epoch = max(last_epoch if inside else last_epoch - 1, 0)
    train = plan.config.train
    first, last = (data.global_batches(train.seed, epoch, train.global_batch_size) for epoch in (0, last_epoch))
    excluded = excluded_ids(plan.config.data.exclude)
    return {
        "samples": len(data.ids),
        "excluded": len(excluded),
        "ids_sha256": _hash(data.ids),
        "last_epoch": last_epoch,
        "first_order_sha256": _hash(first),
        "last_order_sha256": _hash(last),
    }


def _hash(numbers: Tensor) -> str:
    return hashlib.sha256(numbers.cpu().contiguous().numpy().astype("<i8").tobytes()).hexdigest()


def metrics_link(folder: RunFolder) -> dict[str, str]:
    return {path.name: hash_file(path) for path in (folder.metrics_jsonl, folder.steps)}


def results_link(folder: RunFolder, results: dict[str, Any]) -> dict[str, Any]:
    names = ("steps", "weights_sha256", "optimizer_sha256", "test_accuracy", "test_loss", "best_epoch")
    return {"sha256": hash_file(folder.results), **{name: results.get(name) for name in names}}
