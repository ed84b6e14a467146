"""One trainer of benchmarks/gpu.py in its own process: trains, and prints its images/s as JSON.

    python benchmarks/gpu_peers.py seed|lightning|accelerate|torch-ddp|limit MODEL --batch 256 [--data-dir data]

seed: a DataLoader with torchvision's transforms and workers, autocast, channels-first, as in most examples.
lightning, accelerate: the same loader and model in these libraries. limit: a compiled step on one batch that never
leaves the GPU. torch-ddp: a step on such a batch through torch's DDP in a group of one rank, not compiled. None of them
evaluates, saves or logs while being timed. Data: CIFAR-10, or random pictures of its shape.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from paceline.models.registry import build_model
from paceline.settings.schema import ModelConfig

WARMUP_STEPS = 10
SIDES = {"resnet18": 32}  # of the pictures; 224 for all other models


class Pictures(Dataset[tuple[Tensor, int]]):
    """CIFAR-10's training pictures through torchvision's transforms, one at a time."""

    def __init__(self, data_dir: str, side: int) -> None:
        from torchvision import transforms

        self._pictures, self._labels = read_pictures(data_dir)
        first = [transforms.Resize(256), transforms.RandomCrop(224)] if side == 224 else [transforms.RandomCrop(32, 4)]
        normalise = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        flip, to_tensor = transforms.RandomHorizontalFlip(), transforms.ToTensor()
        self._transform = transforms.Compose([transforms.ToPILImage(), *first, flip, to_tensor, normalise])

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._transform(self._pictures[index]), int(self._labels[index])


def read_pictures(data_dir: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """uint8 [N, 32, 32, 3] and labels."""
    files = sorted(Path(data_dir).glob("cifar-10-batches-bin/data_batch_*.bin"))
    if not files:
        random = np.random.default_rng(0)
        return random.integers(0, 256, (50_000, 32, 32, 3), dtype=np.uint8), random.integers(0, 10, 50_000)
    rows = np.concatenate([np.fromfile(file, dtype=np.uint8).reshape(-1, 3073) for file in files])
    return rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1).copy(), rows[:, 0].astype(np.int64)


def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    config = ModelConfig(model_name=name, dropout=0.5 if name == "vgg19" else 0.0)
    return build_model(config, (3, side_of(name), side_of(name)), 10, load_weights=False)


def side_of(name: str) -> int:
    return SIDES.get(name, 224)


def make_loader(name: str, batch: int, data_dir: str) -> DataLoader[Any]:
    workers = os.cpu_count() or 1
    pictures = Pictures(data_dir, side_of(name))
    return DataLoader(
        pictures, batch, shuffle=True, drop_last=True, num_workers=workers, pin_memory=True, persistent_workers=True
    )


def endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


class Clock:
    """Images per second over the steps after the warm-up."""

    def __init__(self, steps: int, batch: int) -> None:
        self._steps, self._batch, self._seen, self._began = steps, batch, 0, 0.0
        self.all_steps = WARMUP_STEPS + steps
        self.images_per_s = 0.0

    def tick(self) -> bool:
        """Record a step. Returns True if it was the last."""
        self._seen += 1
        if self._seen > self.all_steps:
            raise RuntimeError(
                f"step {self._seen} of {self.all_steps}: a step after the last one would falsify the rate"
            )
        if self._seen == WARMUP_STEPS:
            torch.cuda.synchronize()
            self._began = time.perf_counter()
        if self._seen < self.all_steps:
            return False
        torch.cuda.synchronize()
        self.images_per_s = self._steps * self._batch / (time.perf_counter() - self._began)
        return True


def run_seed(name: str, batch: int, data_dir: str, clock: Clock) -> None:
    model = make_model(name).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    for images, labels in endless(make_loader(name, batch, data_dir)):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(model(images.cuda(non_blocking=True)), labels.cuda(non_blocking=True))
        loss.backward()
        optimizer.step()
        if clock.tick():
            return


def run_accelerate(name: str, batch: int, data_dir: str, clock: Clock) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16")
    model = make_model(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader(name, batch, data_dir))
    for images, labels in endless(loader):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        optimizer.step()
        if clock.tick():
            return


def run_lightning(name: str, batch: int, data_dir: str, clock: Clock) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = make_model(name)

        def training_step(self, parts: Any, index: int) -> Tensor:
            images, labels = parts
            return F.cross_entropy(self.model(images), labels)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)

        def on_train_batch_end(self, *_: Any) -> None:
            clock.tick()

    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(
        accelerator="gpu", devices=1, precision="bf16-mixed", max_epochs=-1, max_steps=clock.all_steps, **quiet
    )
    trainer.fit(Module(), make_loader(name, batch, data_dir))


def run_limit(name: str, batch: int, data_dir: str, clock: Clock) -> None:
    model = make_model(name).cuda().to(memory_format=torch.channels_last)
    _repeat_one_batch(model, torch.compile(model), side_of(name), batch, clock)


def run_torch_ddp(name: str, batch: int, data_dir: str, clock: Clock) -> None:
    model = make_model(name).cuda().to(memory_format=torch.channels_last)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda:0"))
    wrapped = DistributedDataParallel(model, device_ids=[0], gradient_as_bucket_view=True)
    _repeat_one_batch(model, wrapped, side_of(name), batch, clock)
    dist.destroy_process_group()


def _repeat_one_batch(model: nn.Module, forward: Any, side: int, batch: int, clock: Clock) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4, fused=True)
    images = torch.randn(batch, 3, side, side, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (batch,), device="cuda")
    while not clock.tick():
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(forward(images), labels)
        loss.backward()
        optimizer.step()


CONTENDERS = {
    "seed": run_seed,
    "lightning": run_lightning,
    "accelerate": run_accelerate,
    "torch-ddp": run_torch_ddp,
    "limit": run_limit,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contender", choices=list(CONTENDERS))
    parser.add_argument("model", help="vgg19, resnet18, torchvision:NAME, timm:NAME")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--data-dir", default="data")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU, and there is none")
    clock = Clock(given.steps, given.batch)
    CONTENDERS[given.contender](given.model, given.batch, given.data_dir, clock)
    print(json.dumps({"images_per_s": clock.images_per_s}), flush=True)


if __name__ == "__main__":
    main()
