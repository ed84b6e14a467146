"""2x2 max-pooling: our kernels, torch's kernels, and the time to move the bytes.

    python benchmarks/pooling.py

Microseconds on a GPU, bf16, channels-last. The first two poolings of `sprint` at batch 1536, VGG's first at 256.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

import paceline.models.pooling  # noqa: F401 - the operators

SHAPES = [(1536, 64, 31, 31), (1536, 256, 15, 15), (256, 64, 224, 224)]
REPEATS = 20


def time_us(work: Callable[[], Any]) -> float:
    for _ in range(3):
        work()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(REPEATS):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / REPEATS * 1000


def measure_copy() -> float:
    """Bytes per second, read and written."""
    source = torch.zeros(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (time_us(lambda: target.copy_(source)) / 1e6)


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("these kernels need a GPU")
    speed = measure_copy()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; copies at {speed / 1e12:.1f} TB/s\n")
    print("| pixels | ours, forward | backward | torch's own, forward | backward | memory, forward | backward |")
    print("|---" * 7 + "|")
    for shape in SHAPES:
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
        values, places = torch.ops.paceline.max_pool_2x2(x)
        gradient, leaf = torch.randn_like(values), x.clone().requires_grad_()
        pooled = F.max_pool2d(leaf, 2)
        cells = [
            time_us(lambda x=x: torch.ops.paceline.max_pool_2x2(x)),
            time_us(lambda g=gradient, p=places, s=shape: torch.ops.paceline.max_unpool_2x2(g, p, *s[2:])),
            time_us(lambda x=x: F.max_pool2d(x, 2)),
            time_us(lambda y=pooled, x=leaf, g=gradient: torch.autograd.grad(y, x, g, retain_graph=True)),
            *[(x.nbytes + values.nbytes + places.nbytes) / speed * 1e6] * 2,  # forward and backward move the same bytes
        ]
        print(f"| {' x '.join(map(str, shape))} | " + " | ".join(f"{cell:,.0f}" for cell in cells) + " |", flush=True)


if __name__ == "__main__":
    main()
