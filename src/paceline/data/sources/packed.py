"""Pictures that `paceline data pack` has packed. Encoded ones are decoded as those of a folder (`data/encoded.py`).

Pixels are mapped into memory and gathered by number. Nothing is decoded. The kernel keeps one copy of a shard's pages
for all ranks of a node and drops them when memory is short, so a set may be larger than memory. Before a batch is
gathered, madvise announces all its pictures to the kernel, which then reads them in parallel, each in one request. From
time to time a rank releases its mapped pages. Otherwise its resident memory would grow with the data set.
"""

from __future__ import annotations

import mmap
import warnings
from pathlib import Path

import torch
from torch import Tensor

from paceline.data.dataset import DatasetInfo, LoadedData
from paceline.data.pack_format import Packed, Shard, open_packed, picture_side
from paceline.data.packed_pictures import PackedPictures
from paceline.data.picture_set import labels_of, picture_info
from paceline.errors import DataError
from paceline.settings.resolution import largest_size
from paceline.settings.schema import DataConfig

_MOST_MAPPED_BYTES = 256 * 2**20  # a rank with more mapped pages releases them
_STATM = Path("/proc/self/statm")


class PackedDataset:
    """One part of a packed data set."""

    if_slow = "a faster disk for the packed pictures, or more memory to keep them in"

    def __init__(self, folder: Path, packed: Packed, part: str) -> None:
        self.decoder = packed.decoder
        self.sample_shape = (3, packed.side, packed.side)
        self._labels = labels_of(packed.per_class[part])
        self.checksums = [shard.crc32 for shard in packed.shards_of(part)]
        self._picture_bytes = packed.picture_bytes
        self._per_shard = packed.pictures_per_shard
        self._maps = [_map(folder / shard.file, shard, packed) for shard in packed.shards_of(part)]
        self._rows = [_as_rows(mapped, packed.picture_bytes) for mapped in self._maps]
        self._other_bytes = _mapped_bytes()  # for example of libraries

    @property
    def labels(self) -> Tensor:
        return self._labels

    @property
    def nbytes(self) -> int:
        return len(self) * self._picture_bytes

    def __len__(self) -> int:
        return len(self._labels)

    def read(self, indices: Tensor) -> Tensor:
        samples = torch.empty((len(indices), *self.sample_shape), dtype=torch.uint8)
        self.read_into(indices, samples)
        return samples

    def read_into(self, indices: Tensor, samples: Tensor) -> None:
        """Like `read`, into given memory: one copy, from the kernel's pages to their place."""
        places = [divmod(index, self._per_shard) for index in indices.tolist()]
        for shard, row in places:
            self._announce(shard, row)
        torch.cat([self._rows[shard][row] for shard, row in places], out=samples.view(-1))
        self._let_go()

    def _announce(self, shard: int, row: int) -> None:
        start = row * self._picture_bytes
        page = start - start % mmap.PAGESIZE
        self._maps[shard].madvise(mmap.MADV_WILLNEED, page, start + self._picture_bytes - page)

    def _let_go(self) -> None:
        """Release this process's mapped pages. They stay in the kernel's page cache."""
        # Read the size from the kernel: it maps up to two megabytes around a page, so counting reads would be wrong.
        if _mapped_bytes() - self._other_bytes > _MOST_MAPPED_BYTES:
            for mapped in self._maps:
                mapped.madvise(mmap.MADV_DONTNEED)
            self._other_bytes = _mapped_bytes()


def _mapped_bytes() -> int:
    """Bytes of file pages mapped by this process; 0 without /proc."""
    return int(_STATM.read_text().split()[2]) * mmap.PAGESIZE if _STATM.exists() else 0


def _map(path: Path, shard: Shard, packed: Packed) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), shard.pictures * packed.picture_bytes, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise DataError("this shard cannot be mapped into memory", where=str(path), got=error) from error


def _as_rows(mapped: mmap.mmap, picture_bytes: int) -> Tensor:
    with warnings.catch_warnings():
        # torch has no read-only tensors and warns. These tensors are never written.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(mapped, dtype=torch.uint8).view(-1, picture_bytes)


def describe(config: DataConfig, seed: int) -> DatasetInfo:
    return _info(open_packed(Path(config.data_dir)), config)


def load(config: DataConfig, seed: int) -> LoadedData:
    folder = Path(config.data_dir)
    packed = open_packed(folder)
    info = _info(packed, config)
    if packed.encoding is None:
        return LoadedData(info, **{part: PackedDataset(folder, packed, part) for part in packed.parts})
    from paceline.data.encoded import encoded_dataset  # imports Pillow, which pixels do not need

    parts = {}
    for part in packed.parts:
        pictures, labels = PackedPictures(folder, packed, part), labels_of(packed.per_class[part])
        parts[part] = encoded_dataset(pictures, labels, info.sample_shape[-1], config)
    return LoadedData(info, **parts)


def _info(packed: Packed, config: DataConfig) -> DatasetInfo:
    sizes = {part: packed.num_pictures(part) for part in packed.parts}
    return picture_info(packed.classes, sizes, packed.side or picture_side(largest_size(config)))
