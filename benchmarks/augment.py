"""RandAugment for a batch of 256 pictures of 32x32: Paceline, and torchvision's v2 picture by picture.

    python benchmarks/augment.py            # needs torchvision; one CPU thread, in turn, CPU time

A DataLoader's workers apply torchvision to single pictures, so its time per batch is the sum over the pictures. With as
many workers, or ranks of Paceline, as cores, each core does this work for its part of the pictures: so the CPU time of
one thread is compared. Both sides are timed in turn, `ROUNDS` times; the table has the median and the range. Both draw
new choices in each round. torchvision's conversion to tensors and the collation of a batch are not counted.
"""

from __future__ import annotations

import itertools
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from paceline.data.draws import draw_bits
from paceline.data.policies import rand_augment, trivial_augment

PICTURES, SIDE, ROUNDS = 256, 32, 15


def cpu_ms(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return 1000 * (time.process_time() - began)


def main() -> None:
    try:
        import torchvision
        from torchvision.transforms import v2
    except (ImportError, RuntimeError) as error:
        raise SystemExit(f"this benchmark needs torchvision: {error}") from error
    torch.set_num_threads(1)
    pictures = torch.randint(0, 256, (PICTURES, 3, SIDE, SIDE), dtype=torch.uint8)
    as_pil = [v2.functional.to_pil_image(picture) for picture in pictures]
    rounds = itertools.count()

    def draw() -> Tensor:
        """New choices in every round, as in every epoch of training; torchvision draws them in its calls, too."""
        return draw_bits(torch.arange(PICTURES), next(rounds))

    theirs, trivial = v2.RandAugment(2, 9), v2.TrivialAugmentWide()
    works: dict[str, Callable[[], object]] = {
        "RandAugment, Paceline": lambda: rand_augment(pictures, draw(), 2, 9, 0.0),
        "RandAugment, torchvision v2, tensors": lambda: [theirs(picture) for picture in pictures],
        "RandAugment, torchvision v2, PIL": lambda: [theirs(picture) for picture in as_pil],
        "TrivialAugment, Paceline": lambda: trivial_augment(pictures, draw()),
        "TrivialAugment, torchvision v2, tensors": lambda: [trivial(picture) for picture in pictures],
        "TrivialAugment, torchvision v2, PIL": lambda: [trivial(picture) for picture in as_pil],
    }
    for work in works.values():
        work()  # the first call allocates
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, work in works.items():
            times[name].append(cpu_ms(work))
    machine = platform.processor() or platform.machine()
    print(f"torch {torch.__version__}, torchvision {torchvision.__version__}, {machine}")
    print(f"{PICTURES} pictures of {SIDE}x{SIDE}, one thread, ms of CPU time: median (lowest to highest of {ROUNDS})")
    for name, values in times.items():
        print(f"{name:<42} {statistics.median(values):7.1f}  ({min(values):.1f} to {max(values):.1f})")


if __name__ == "__main__":
    main()
