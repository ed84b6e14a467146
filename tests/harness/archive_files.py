"""Small picture folders, and the same pictures as tar, WebDataset, zip and parquet files."""

from __future__ import annotations

import io
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("ant", "bird")


def make_pictures(root: Path, sizes: dict[str, int], side: int = 24) -> Path:
    """`sizes`: pictures per class, by part; "" for class folders without parts."""
    draw = np.random.default_rng(0)
    for part, count in sizes.items():
        for name in CLASSES:
            folder = root / part / name
            folder.mkdir(parents=True)
            for number in range(count):
                # Names whose order differs with and without their extension.
                path = folder / (f"{number}.jpg" if number % 2 else f"{number - 1}-b.jpg")
                Image.fromarray(draw.integers(0, 256, (side, side + number, 3), dtype=np.uint8)).save(path)
    return root


def pictures_of(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def write_tar(target: Path, members: Iterable[tuple[str, bytes]]) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(target, "w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return target


def as_tree(root: Path, top: str = "") -> list[tuple[str, bytes]]:
    """Not in order: an archive may have any."""
    return [(f"{top}{path.relative_to(root).as_posix()}", path.read_bytes()) for path in reversed(pictures_of(root))]


def write_webdataset(root: Path, target: Path, shards: int = 2, label: str = "cls") -> Path:
    """Shards per part, with the classes mixed. Keys are the file names, with the class in front to be unique."""
    for part in sorted(path.name for path in root.iterdir()):
        paths = pictures_of(root / part)
        for shard in range(shards):
            members = []
            for path in paths[shard::shards]:
                key = f"{path.parent.name}/{path.stem}"
                number = CLASSES.index(path.parent.name)
                text = str(number) if label == "cls" else f'{{"label": "{path.parent.name}", "width": 24}}'
                members += [(f"{key}.jpg", path.read_bytes()), (f"{key}.{label}", text.encode())]
            write_tar(target / f"{part}-{shard:06}.tar", members)
    if label == "cls":
        (target / "classes.txt").write_text("\n".join(CLASSES) + "\n")
    return target


def write_zip(root: Path, target: Path, method: int = zipfile.ZIP_STORED, top: str = "") -> Path:
    with zipfile.ZipFile(target, "w", method) as archive:
        for name, content in as_tree(root, top):
            archive.writestr(name, content)
    return target


def write_parquet(root: Path, target: Path, shards: int = 2, *, with_path: bool = True) -> Path:
    """As Hugging Face writes it, with small row groups."""
    import json

    import pyarrow as pa
    import pyarrow.parquet as pq

    target.mkdir(parents=True, exist_ok=True)
    features = {"image": {"_type": "Image"}, "label": {"names": list(CLASSES), "_type": "ClassLabel"}}
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    schema = pa.schema(
        [("image", image), ("label", pa.int64())], {"huggingface": json.dumps({"info": {"features": features}})}
    )
    for part in sorted(path.name for path in root.iterdir()):
        for shard in range(shards):
            paths = pictures_of(root / part)[shard::shards]
            names = [f"{path.parent.name}_{path.name}" if with_path else None for path in paths]
            cells = [{"bytes": path.read_bytes(), "path": name} for path, name in zip(paths, names, strict=True)]
            labels = [CLASSES.index(path.parent.name) for path in paths]
            table = pa.table({"image": cells, "label": labels}, schema)
            pq.write_table(table, target / f"{part}-{shard:05}-of-{shards:05}.parquet", row_group_size=2)
    return target
