"""The files of the known data sets, and their folders. Imports no torch."""

from __future__ import annotations

import difflib
import shlex
from contextlib import suppress
from pathlib import Path

from paceline.errors import DataError
from paceline.settings.schema import DataConfig

CIFAR10_FOLDER = "cifar-10-batches-bin"
CIFAR10_PICKLED_FOLDER = "cifar-10-batches-py"
CIFAR10_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")  # the test set comes last
CIFAR10_PICKLED_FILES = tuple(name.removesuffix(".bin") for name in CIFAR10_FILES)
CIFAR100_FOLDER = "cifar-100-python"  # as torchvision has it
CIFAR100_MD5 = {"train": "16019d7e3df5f24257cddd939b257f8d", "test": "f0ef6b0ae62326f3e7ffdfab6717acfc"}
FASHION_MNIST_FOLDER = "fashion-mnist"
FASHION_MNIST_OTHER_FOLDER = Path("FashionMNIST", "raw")  # where torchvision puts it
FASHION_MNIST_MD5 = {  # of the gzipped files
    "train-images-idx3-ubyte": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "train-labels-idx1-ubyte": "25c81989df183df01b3e8a0aad5dffbe",
    "t10k-images-idx3-ubyte": "bef4ecab320f06d8554ea6380940ec79",
    "t10k-labels-idx1-ubyte": "bb300cfdad3c16e7a12a480ee83cd310",
}


def missing_files(dataset: str, data_dir: Path) -> list[str]:
    """The files to download. Empty for a set that is complete, generated, or the user's own."""
    if dataset == "cifar10":
        missing = missing_cifar10(cifar10_folder(data_dir))
        pickled = find_pickled_cifar10(data_dir) if missing else None
        return [] if pickled is not None and not missing_pickles(pickled) else missing
    if dataset == "cifar100":
        return missing_cifar100(cifar100_folder(data_dir))
    if dataset == "fashion-mnist":
        return [f"{name}.gz" for name in FASHION_MNIST_MD5 if find_fashion_mnist(data_dir, name) is None]
    return []


def require_data_folder(config: DataConfig, *, where: str, hint: str = "") -> None:
    """A data set is downloaded into the default folder, which is created, or into a folder that exists.

    A folder that is named and does not exist is a typing mistake or a disk that is not mounted. Only
    `paceline data fetch` creates it.
    """
    folder = Path(config.data_dir)
    if folder == Path(DataConfig.data_dir) or folder.exists() or not missing_files(config.dataset, folder):
        return
    hint = hint or shlex.join(["paceline", "data", "fetch", config.dataset, "--data-dir", config.data_dir])
    with suppress(OSError):
        names = [path.name for path in folder.absolute().parent.iterdir() if path.is_dir()]
        if close := difflib.get_close_matches(folder.name, names, n=1):
            hint = f"--data-dir {shlex.quote(str(folder.parent / close[0]))}\nor {hint}"
    raise DataError(
        "there is no such folder",
        where=where,
        got=str(folder.absolute()),
        allowed=f"a folder with {config.dataset}, or an empty one for its download",
        hint=hint,
    )


def cifar10_folder(data_dir: Path) -> Path:
    """`data_dir` may be the folder of the batches or the folder above it."""
    is_itself = data_dir.name == CIFAR10_FOLDER or any((data_dir / name).exists() for name in CIFAR10_FILES)
    return data_dir if is_itself else data_dir / CIFAR10_FOLDER


def missing_cifar10(folder: Path) -> list[str]:
    return [name for name in CIFAR10_FILES if not (folder / name).exists()]


def cifar100_folder(data_dir: Path) -> Path:
    """`data_dir` may be the folder of the files or the folder above it."""
    return data_dir if data_dir.name == CIFAR100_FOLDER else data_dir / CIFAR100_FOLDER


def missing_cifar100(folder: Path) -> list[str]:
    return [name for name in CIFAR100_MD5 if not (folder / name).exists()]


def find_pickled_cifar10(data_dir: Path) -> Path | None:
    """The folder of the pickled version, complete or not: `data_dir` or a folder in it."""
    for folder in (data_dir, data_dir / CIFAR10_PICKLED_FOLDER):
        if any((folder / name).exists() for name in CIFAR10_PICKLED_FILES):
            return folder
    return None


def missing_pickles(folder: Path) -> list[str]:
    return [name for name in CIFAR10_PICKLED_FILES if not (folder / name).exists()]


def find_fashion_mnist(data_dir: Path, name: str) -> Path | None:
    """One of the four files, plain or gzipped."""
    for folder in (data_dir / FASHION_MNIST_FOLDER, data_dir / FASHION_MNIST_OTHER_FOLDER):
        for candidate in (folder / name, folder / f"{name}.gz"):
            if candidate.exists():
                return candidate
    return None
