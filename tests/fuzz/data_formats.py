"""Data sets, pictures and weights: files that are downloaded, unpacked or sent by other users."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from fuzz.mutations import mutate_bytes, mutate_csv, mutate_json, mutate_safetensors
from fuzz.sandbox import Format, Reader

# --- Weights ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _model() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))


def _build_weights(suffix: str) -> Callable[[Path, Path], None]:
    def build(samples: Path, folder: Path) -> None:
        import torch
        from safetensors.torch import save_file

        state = {name: value.clone() for name, value in _model().state_dict().items()}
        if suffix == "safetensors":
            save_file(state, folder / "weights.safetensors", {"format": "pt"})
        else:
            torch.save({"state_dict": state, "epoch": 3}, folder / "weights.pth")

    return build


def _load_weights(folder: Path) -> None:
    from paceline.models.weights import load_weights

    load_weights(_model(), "mlp", str(next(folder.glob("weights.*"))))


# --- Pictures ---------------------------------------------------------------------------------------------------------


def _build_picture(suffix: str) -> Callable[[Path, Path], None]:
    def build(samples: Path, folder: Path) -> None:
        import numpy as np
        from PIL import Image

        pixels = np.arange(24 * 20 * 3, dtype=np.uint8).reshape(24, 20, 3)
        Image.fromarray(pixels).save(folder / f"picture.{suffix}")

    return build


def _read_picture(folder: Path) -> None:
    from paceline.data.pictures import read_pixels

    read_pixels(next(folder.glob("picture.*")), 16)


# --- Packed pictures --------------------------------------------------------------------------------------------------


def _build_packed(samples: Path, folder: Path) -> None:
    import numpy as np
    from PIL import Image

    from paceline.cli.command import run_verb

    for number in range(8):
        for half in ("train", "test"):
            target = folder / "pictures" / half / f"class-{number % 2}"
            target.mkdir(parents=True, exist_ok=True)
            pixels = np.full((12, 12, 3), 10 * number, dtype=np.uint8)
            Image.fromarray(pixels).save(target / f"{number}.png")
    run_verb("data", ["pack", str(folder / "pictures"), str(folder / "packed"), "--image-size", "8", "--shard-mb", "1"])


def _mutate_index(data: bytes, draw: Random) -> bytes:
    """With a correct checksum in three of four cases."""
    from paceline.data.pack_format import _seal

    mutated = mutate_json(data, draw)
    if draw.randrange(4):
        try:
            body = json.loads(mutated)
            body.pop("crc32", None)
            mutated = json.dumps({**body, "crc32": _seal(body)}).encode(errors="surrogatepass")
        except (ValueError, TypeError, AttributeError, RecursionError):
            pass
    return mutated


def _load_packed(folder: Path) -> None:
    import torch

    from paceline.data.sources import packed
    from paceline.settings.schema import DataConfig

    config = DataConfig(dataset="folder", data_dir="packed", image_size=8)
    packed.describe(config, 0)
    loaded = packed.load(config, 0)
    for half in (loaded.train, loaded.test):
        half.read(torch.arange(len(half)))


def _check_packed(folder: Path) -> None:
    from paceline.cli.command import run_verb

    run_verb("data", ["check", "packed"])


# --- CIFAR-10 and Fashion-MNIST ---------------------------------------------------------------------------------------


def _build_fashion(samples: Path, folder: Path) -> None:
    """The labels of the test set: the smallest file, in its published form."""
    content = bytes((0, 0, 8, 1)) + (10_000).to_bytes(4, "big") + bytes(n % 10 for n in range(10_000))
    (folder / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(content))


@lru_cache(maxsize=1)
def _bomb() -> bytes:
    return gzip.compress(bytes(1 << 26), compresslevel=1) * 24


def _mutate_gzip(data: bytes, draw: Random) -> bytes:
    """The file, its unpacked content, or a bomb: more than a gigabyte of zeros."""
    action = draw.randrange(50)
    if action == 0:
        return _bomb()
    return mutate_bytes(data, draw) if action < 25 else gzip.compress(mutate_bytes(gzip.decompress(data), draw))


def _read_fashion(folder: Path) -> None:
    from paceline.data.sources.fashion_mnist import _read_idx

    _read_idx(folder / "t10k-labels-idx1-ubyte.gz", (10_000,))


# --- A user's own arrays ----------------------------------------------------------------------------------------------

_OWN = """\
import csv
import numpy as np

def load(data_dir):
    samples = np.load(f"{data_dir}/samples.npy")
    with open(f"{data_dir}/labels.csv", newline="") as file:
        labels = np.array([int(row["label"]) for row in csv.DictReader(file)])
    return (samples, labels), (samples, labels)
"""


def _build_own(samples: Path, folder: Path) -> None:
    import numpy as np

    (folder / "own.py").write_text(_OWN)
    np.save(folder / "samples.npy", np.arange(6 * 3 * 4 * 4, dtype=np.uint8).reshape(6, 3, 4, 4))
    (folder / "labels.csv").write_text("name,label\n" + "".join(f"{n},{n % 3}\n" for n in range(6)))


def _load_own(folder: Path) -> None:
    from paceline.data.sources import custom
    from paceline.settings.schema import DataConfig

    custom.load.cache_clear()
    custom.load(DataConfig(dataset=f"{folder}/own.py:load", data_dir=str(folder)), 0)


# --- Arrays of paceline.train -----------------------------------------------------------------------------------------


def _build_arrays(samples: Path, folder: Path) -> None:
    import numpy as np

    from paceline.data.adapt import adapt_parts
    from paceline.data.sources.arrays import header_of, write_arrays

    part = np.arange(6 * 3 * 4 * 4, dtype=np.uint8).reshape(6, 3, 4, 4), ["a", "b", "c"] * 2
    data = adapt_parts({"train": part, "test": part}, None, "arrays")
    write_arrays(data, header_of(data, is_test_held_out=False), folder / "all").rename(folder / "arrays")


def _load_arrays(folder: Path) -> None:
    import torch

    from paceline.data.registry import load_dataset
    from paceline.settings.schema import DataConfig

    loaded = load_dataset(DataConfig(dataset="arrays", data_dir=str(folder / "arrays")), 0)
    for _, part in loaded.parts():
        part.read(torch.arange(len(part)))


ARRAYS = (Reader("train on arrays", _load_arrays),)
WEIGHTS = (Reader("--weights", _load_weights),)
OWN = (Reader("a data set of the user's own", _load_own),)
PACKED = (Reader("train on packed pictures", _load_packed), Reader("data check", _check_packed))


def _picture(suffix: str) -> Format:
    name = f"picture.{suffix}"
    return Format(name, _build_picture(suffix), name, mutate_bytes, (Reader("read a picture", _read_picture),))


FORMATS = (
    Format("weights.safetensors", _build_weights("safetensors"), "weights.safetensors", mutate_safetensors, WEIGHTS),
    Format("weights.pth", _build_weights("pth"), "weights.pth", mutate_bytes, WEIGHTS),
    *(_picture(suffix) for suffix in ("png", "jpg", "gif", "bmp", "webp", "tif", "ppm")),
    Format("packed.json", _build_packed, "packed/packed.json", _mutate_index, PACKED),
    Format(
        "fashion-mnist", _build_fashion, "t10k-labels-idx1-ubyte.gz", _mutate_gzip, (Reader("train", _read_fashion),)
    ),
    Format("arrays.json", _build_arrays, "arrays/arrays.json", mutate_json, ARRAYS),
    Format("arrays/samples.npy", _build_arrays, "arrays/train-samples.npy", mutate_bytes, ARRAYS),
    Format("arrays/labels.npy", _build_arrays, "arrays/train-labels.npy", mutate_bytes, ARRAYS),
    Format("own data/samples.npy", _build_own, "samples.npy", mutate_bytes, OWN, may_run=("own.py",)),
    Format("own data/labels.csv", _build_own, "labels.csv", mutate_csv, OWN, may_run=("own.py",)),
)
