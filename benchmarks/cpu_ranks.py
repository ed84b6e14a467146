"""One rank of one trainer of benchmarks/cpu.py, started by torchrun: trains some steps and writes their times.

    torchrun --standalone --nproc-per-node 2 benchmarks/cpu_ranks.py KIND WORK ANSWER --steps N

All trainers use the same model, samples and global batch, one thread per rank, and no evaluation. Peers get their data
as float tensors without augmentation, which is the best case of a DataLoader.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from paceline.data.registry import load_dataset
from paceline.models.cnn import CNN
from paceline.models.mlp import MLP
from paceline.parallel.node_sum import open_node_sum
from paceline.runtime.detect import World
from paceline.runtime.memory import keep_freed_memory
from paceline.settings.schema import DataConfig


@dataclass(frozen=True)
class Work:
    """The training task, the same for all trainers."""

    shape: str
    samples: int
    rank_batch: int
    steps: int
    warmup: int
    optimizer: str

    def build(self) -> nn.Module:
        torch.manual_seed(42)
        return CNN((3, 32, 32), 10) if "x" in self.shape else MLP((784,), 10, hidden_size=256, dropout=0.2)

    def build_plainly(self) -> nn.Module:
        """The model as written in the course."""
        model = self.build()
        if "x" in self.shape:
            layers: list[nn.Module] = []
            for convolution in [layer for layer in model.features if isinstance(layer, nn.Conv2d)]:  # type: ignore
                layers += [convolution, nn.ReLU(), nn.MaxPool2d(2)]
            model.features = nn.Sequential(*layers)
        return model

    def optimize(self, model: nn.Module, **options: Any) -> torch.optim.Optimizer:
        if self.optimizer == "adam":
            return torch.optim.Adam(model.parameters(), 1e-3, **options)
        return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True, weight_decay=5e-4, **options)

    def load(self) -> tuple[Tensor, Tensor]:
        """The same samples as `paceline train --dataset synthetic`."""
        config = DataConfig(dataset="synthetic", input_size=self.shape, num_samples=self.samples)
        data = load_dataset(config, 42).train
        return data.read(torch.arange(len(data))), data.labels


WORKS = {
    # Fewer steps than Paceline's first epoch, so that no evaluation is timed.
    "cnn": Work("3x32x32", 30_000, 128, 90, 20, "nesterov"),
    "mlp": Work("784", 75_000, 64, 550, 100, "adam"),
}
MEAN, STD = 0.5, 0.14  # of synthetic pixels


class Marks:
    """The end of each step, by the wall clock and in CPU seconds of all threads of this rank."""

    def __init__(self, work: Work) -> None:
        self._last = work.steps
        self.moments: list[tuple[float, float]] = []

    def step(self) -> bool:
        """Record a step. Returns whether it was the last one."""
        self.moments.append((time.perf_counter(), time.process_time()))
        return len(self.moments) >= self._last


def batches(loader: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Epoch after epoch."""
    epoch = 0
    while True:
        sampler = getattr(loader, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def as_floats(samples: Tensor) -> Tensor:
    return (samples.float() / 255 - MEAN) / STD if samples.dtype == torch.uint8 else samples


def make_loader(work: Work, *, is_distributed: bool) -> DataLoader[Any]:
    samples, labels = work.load()
    data = TensorDataset(as_floats(samples), labels)
    sampler = DistributedSampler(data, shuffle=True, drop_last=True) if is_distributed else None
    return DataLoader(data, work.rank_batch, sampler=sampler, shuffle=sampler is None, drop_last=True)


def by_hand(work: Work, marks: Marks) -> None:
    """DataLoader, DistributedSampler and DDP as in tutorials. Metrics are not read during steps."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(work.build_plainly())
    optimizer = work.optimize(model)
    for inputs, labels in batches(make_loader(work, is_distributed=True)):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        if marks.step():
            break
    dist.destroy_process_group()


def like_the_seed(work: Work, marks: Marks) -> None:
    """The same, but loss and accuracy are read at every step, as in Runnable's tutorial."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(work.build())
    optimizer = work.optimize(model)
    loss_sum, correct = 0.0, 0
    for inputs, labels in batches(make_loader(work, is_distributed=True)):
        optimizer.zero_grad()
        logits = model(inputs)
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()
        loss_sum += loss.item()
        correct += int((logits.argmax(1) == labels).sum())
        if marks.step():
            break
    dist.destroy_process_group()


def same_means(work: Work, marks: Marks) -> None:
    """Paceline's optimisations in a bare loop: resident samples, channels-last, shared memory, a fused update."""
    keep_freed_memory()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    world = World(rank, ranks, rank, ranks, "the benchmark", "here", "cpu", "gloo", 1)
    samples, labels = work.load()
    model = work.build().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = work.optimize(model, fused=True)
    parameters = list(model.parameters())
    node_sum = open_node_sum(sum(parameter.numel() for parameter in parameters), world)
    assert node_sum is not None
    mine, total = (_as_parameters(flat, parameters) for flat in (node_sum.mine, node_sum.total))
    order: list[Tensor] = []
    while True:
        if not order:
            order = list(torch.randperm(len(labels)).split(work.rank_batch)[: len(labels) // work.rank_batch])
        ids = order.pop()
        inputs = samples[ids]
        if inputs.dtype == torch.uint8:
            inputs = ((inputs.float() - 255 * MEAN) / (255 * STD)).contiguous(memory_format=torch.channels_last)
        F.cross_entropy(model(inputs), labels[ids]).backward()
        torch._foreach_copy_(mine, [parameter.grad for parameter in parameters])
        node_sum.add_up(scale=1 / ranks)
        for parameter, gradient in zip(parameters, total, strict=True):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
        if marks.step():
            break
    dist.destroy_process_group()


def _as_parameters(flat: Tensor, parameters: list[nn.Parameter]) -> list[Tensor]:
    views, start = [], 0
    for parameter in parameters:
        part = flat[start : start + parameter.numel()]
        views.append(part.as_strided(parameter.shape, parameter.stride()))
        start += parameter.numel()
    return views


def with_lightning(work: Work, marks: Marks) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = work.build_plainly()

        def training_step(self, batch: Any, number: int) -> Tensor:
            return F.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return work.optimize(self.model)

        def on_train_batch_end(self, *_: Any) -> None:
            self.trainer.should_stop = marks.step()

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=-1,
        max_steps=work.steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), make_loader(work, is_distributed=False))


def with_accelerate(work: Work, marks: Marks) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = work.build_plainly()
    model, optimizer, loader = accelerator.prepare(model, work.optimize(model), make_loader(work, is_distributed=False))
    for inputs, labels in batches(loader):
        optimizer.zero_grad()
        accelerator.backward(F.cross_entropy(model(inputs), labels))
        optimizer.step()
        if marks.step():
            break
    accelerator.end_training()


KINDS: dict[str, Callable[[Work, Marks], None]] = {
    "by-hand": by_hand,
    "seed": like_the_seed,
    "same-means": same_means,
    "lightning": with_lightning,
    "accelerate": with_accelerate,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("work", choices=WORKS)
    parser.add_argument("answer", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    work = replace(WORKS[arguments.work], steps=arguments.steps)
    marks = Marks(work)
    KINDS[arguments.kind](work, marks)
    if os.environ["RANK"] == "0":
        arguments.answer.write_text(json.dumps(marks.moments))


if __name__ == "__main__":
    main()
