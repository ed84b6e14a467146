"""CIFAR-100 (fine labels) from the pickled files that torchvision uses, too; downloaded if absent.

The files are read without an unpickler, because an unpickler executes code that a file names.
"""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.data.dataset import DatasetInfo, LoadedData, ResidentDataset
from paceline.data.fetch import fetch_file, locked
from paceline.data.known_files import CIFAR100_FOLDER, CIFAR100_MD5, cifar100_folder, missing_cifar100
from paceline.data.sources.cifar10 import SHAPE, read_pickled, unpack
from paceline.errors import DataError
from paceline.settings.schema import DataConfig

ARCHIVE_URL = "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz"
ARCHIVE_MD5 = "eb9058c3a382ffc7106e4002c42a8d85"
ARCHIVE_NAME = "cifar-100-python.tar.gz"
COUNTS = {"train": 50_000, "test": 10_000}
MEAN = (0.5071, 0.4866, 0.4409)
STD = (0.2673, 0.2564, 0.2762)
_NAMES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale
willow_tree wolf woman worm
"""
CLASSES = tuple(_NAMES.split())


def describe(config: DataConfig, seed: int) -> DatasetInfo:
    return DatasetInfo("cifar100", COUNTS["train"], COUNTS["test"], CLASSES, SHAPE, MEAN, STD)


def load(config: DataConfig, seed: int) -> LoadedData:
    folder = cifar100_folder(Path(config.data_dir))
    if missing_cifar100(folder):
        _fetch(folder)
    train, test = (_resident(folder / name) for name in CIFAR100_MD5)
    return LoadedData(describe(config, seed), train, test)


def _fetch(folder: Path) -> None:
    try:
        with locked(folder):
            if missing := missing_cifar100(folder):
                archive = fetch_file(
                    ARCHIVE_URL,
                    folder.parent / ARCHIVE_NAME,
                    checksum=ARCHIVE_MD5,
                    algorithm="md5",
                    what="CIFAR-100",
                )
                unpack(archive, folder, [f"{CIFAR100_FOLDER}/{name}" for name in missing])
    except OSError as error:
        raise DataError("could not put CIFAR-100 in place", where=str(folder), got=error) from error


def _resident(path: Path) -> ResidentDataset:
    labels, pixels = read_pickled(path, COUNTS[path.name], "fine_labels", len(CLASSES), "CIFAR-100")
    return ResidentDataset(torch.from_numpy(pixels.reshape(-1, *SHAPE).copy()), torch.tensor(labels))
