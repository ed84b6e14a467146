"""Data streamed to a GPU: the right samples, in order, copied during its work. Run with `pytest -m gpu`."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from harness.runs import read_results, step_losses
from paceline.cli.main import main
from paceline.data.ahead import ReadingWatch, read_ahead
from paceline.data.dataset import ResidentDataset
from paceline.data.loader import _make_resident, _OnHost
from paceline.data.registry import load_dataset

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]
FLAGS = ["--dataset=folder", "--image-size=56", "--global-batch-size=64", "--epochs=2", "--log-frequency=1", "--track"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Pictures, and the same pictures packed."""
    home = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    for name in ("ant", "bee"):
        (home / "pictures" / name).mkdir(parents=True)
        for number in range(400):
            pixels = random.integers(0, 256, (64, 72, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(home / "pictures" / name / f"{number:03}.png")
    pack = ["data", "pack", str(home / "pictures"), str(home / "packed"), "--image-size=56", "--shard-mb=1"]
    assert main(pack) == 0
    return home / "pictures", home / "packed"


def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (2**20, 2**30))


def test_folder_packed_and_packed_on_the_gpu_give_the_same_losses(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(name: str, data: Path) -> tuple[list[float], str]:
        run = tmp_path / name
        flags = [*FLAGS, "--deterministic", f"--data-dir={data}", f"--output-dir={run}"]
        assert main(["train", "shapes-cnn", *flags]) == 0
        return step_losses(run), read_results(run)["weights_sha256"]

    from_folder = train("folder", folders[0])
    assert train("resident", folders[1]) == from_folder
    # Ranks are separate processes: this process decides how much they may keep on the GPU.
    data = load_dataset(_config(folders[1]), 0).train
    assert isinstance(_make_resident(data, "cuda"), ResidentDataset)
    no_room(monkeypatch)
    assert _make_resident(data, "cuda") is data


def _config(data: Path):  # type: ignore[no-untyped-def]
    from paceline.settings.schema import DataConfig

    return DataConfig(dataset="folder", data_dir=str(data), image_size=56)


@pytest.mark.parametrize("kind", ["packed", "folder", "too large for the GPU"])
def test_streamed_samples_are_correct(folders: tuple[Path, Path], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = load_dataset(_config(folders[0] if kind == "folder" else folders[1]), 0).train
    everything = data.read(torch.arange(len(data)))
    if kind.startswith("too large"):
        no_room(monkeypatch)
        data = _make_resident(ResidentDataset(everything, data.labels), "cuda")
        assert isinstance(data, _OnHost)
    order = torch.randperm(len(everything), generator=torch.Generator().manual_seed(1))
    shares = list(order.repeat(4).split(32))
    heavy = torch.randn(2048, 2048, device="cuda")
    sums = []
    for number, (ids, samples) in enumerate(read_ahead(data, shares, "cuda", ReadingWatch(data))):
        assert torch.equal(ids, shares[number])
        # The GPU is slower than the host, so that memory that is reused too early would be overwritten before its use.
        for _ in range(8):
            heavy = (heavy @ heavy).clamp_(-1, 1)
        sums.append(
            (samples.long() * torch.arange(1, samples[0].numel() + 1, device="cuda").view(samples[0].shape)).sum()
        )
        del samples
    weights = torch.arange(1, everything[0].numel() + 1).view(everything[0].shape)
    expected = [int((everything[ids].long() * weights).sum()) for ids in shares]
    assert torch.stack(sums).tolist() == expected


def test_copies_overlap_with_computation() -> None:
    """Measured on the GPU, with a margin of a third, because other work may share the machine."""
    samples = torch.zeros(64, 3 * 1024, 1024, dtype=torch.uint8)  # 201 MB
    data = _OnHost(ResidentDataset(samples.view(64, 3, 1024, 1024), torch.zeros(64)))
    shares = [torch.arange(64)] * 12
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def seconds(*, reads: bool, products: int) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        coming = read_ahead(data, shares, "cuda", ReadingWatch(data)) if reads else iter([None] * len(shares))
        for _ in coming:
            for _ in range(products):
                square @ square
        torch.cuda.synchronize()
        return time.perf_counter() - began

    seconds(reads=True, products=12)
    read_s, some_s = seconds(reads=True, products=0), seconds(reads=False, products=12)
    as_long = max(1, round(12 * read_s / some_s))  # computation and reading: only then can they overlap
    compute_s, both_s = seconds(reads=False, products=as_long), seconds(reads=True, products=as_long)
    print(f"reading and copying {read_s:.3f} s, computing {compute_s:.3f} s, both {both_s:.3f} s")
    assert both_s < max(read_s, compute_s) + min(read_s, compute_s) * 2 / 3
