"""Prints the predicted memory of a rank, and the resident memory that two training steps take. Run as a script.

python step_memory.py RECIPE FLAGS...
"""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from paceline.data.registry import describe_dataset
from paceline.models.registry import build_model
from paceline.settings.load import load_config
from paceline.training.memory import estimate_memory
from paceline.training.optim import build_optimizer
from paceline.training.plan import RunPlan, make_plan

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt


def return_memory_at_once() -> None:
    """glibc keeps freed memory. Then the resident memory would not show what is in use."""
    library = ctypes.CDLL(None)
    for name in (_TRIM_THRESHOLD, _MMAP_THRESHOLD):
        library.mallopt(name, 65536)


def status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def load_kernels() -> None:
    """The first convolution and update load libraries, which are no tensors."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(1568, 10))
    model(torch.randn(4, 3, 16, 16)).sum().backward()
    torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=True).step()


def take_steps(plan: RunPlan) -> None:
    model = build_model(plan.config.model, plan.input_shape, plan.info.num_classes)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = build_optimizer(plan.config.optim, model)
    for _ in range(2):
        inputs = torch.randn(plan.microbatch_size, *plan.largest_shape).contiguous(memory_format=torch.channels_last)
        labels = torch.randint(0, plan.info.num_classes, (len(inputs),))
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    torch.set_num_threads(1)
    return_memory_at_once()
    config = load_config(sys.argv[1], sys.argv[2:]).config
    plan = make_plan(config, describe_dataset(config.data, config.train.seed), 1)
    predicted = estimate_memory(plan, "single", is_mixed=False).total
    load_kernels()
    gc.collect()
    before = status_bytes("VmRSS")
    take_steps(plan)
    print(predicted, status_bytes("VmHWM") - before)


if __name__ == "__main__":
    main()
