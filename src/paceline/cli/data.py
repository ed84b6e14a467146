"""`paceline data pack|check|fetch`: pack pictures, verify data sets, download them."""

from __future__ import annotations

import difflib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal

from paceline.cli.command import Command
from paceline.data.pack_format import Encoding, is_packed
from paceline.errors import EXIT_FINISHED, UserError
from paceline.runtime.resources import usable_cores
from paceline.settings.declare import Arg, Range

_LINE_EVERY_S = 2.0
_DATA_DIR = Path("data")
Workers = Annotated[int | None, Range(low=1, high=256)]


@dataclass(frozen=True)
class Pack:
    """Write the pictures of a folder into a few large files, as pixels or as they are encoded.

    Then: paceline train RECIPE --dataset folder --data-dir PACKED. It trains on them with the same result as on
    PICTURES, bit for bit. Pixels are for small pictures: training decodes nothing. The shorter side of each picture is
    scaled to 8/7 of --image-size (256 for 224) and its central square is kept, as training does it. Encoded pictures
    (JPEG) take a tenth of the space, and training decodes them. If packing was stopped or killed, the same command
    continues. When pictures have changed, it packs only their shards again.
    """

    pictures: Annotated[str, Arg(place="word")]
    """The folder: PICTURES/train/CLASS/*, PICTURES/test/CLASS/* and, if it is there, PICTURES/val/CLASS/*; or
    PICTURES/CLASS/*."""
    packed: Annotated[str, Arg(place="word")]
    """A new folder."""
    format: Literal["pixels", "encoded"] = "pixels"
    """pixels of a central square, or the encoded pictures as they are."""
    image_size: Annotated[int | None, Range(low=8, high=2048)] = None
    """Side of the model's input, as in training (224 unless given). For pixels."""
    max_side: Annotated[int | None, Range(low=8, high=65500)] = None
    """For encoded pictures: scale larger ones to this longer side, and encode them again as JPEG."""
    quality: Annotated[int | None, Range(low=1, high=100)] = None
    """Of these JPEG pictures (90 unless given)."""
    unreadable: Annotated[int, Range(low=0, high=10**9)] = 0
    """How many pictures may be unreadable; each is replaced by a grey one."""
    workers: Workers = None
    """Processes that decode (one per core unless given)."""
    shard_mb: Annotated[int | None, Range(low=1, high=65536)] = None
    """Size of a file (64 MB unless given, or 1/256 of a very large set)."""


@dataclass(frozen=True)
class Check:
    """Verify a data set. Exit code 3 if something is damaged; it is named.

    A packed folder: every byte against its CRC-32. Pictures in folders, tar or zip files: each is decoded, and the
    command lists what is used for what, which files are skipped and which pictures are suspicious. A folder with CSV
    files: the pictures that they list, and what their labels are for. cifar10, cifar100, fashion-mnist: against their
    checksums.
    """

    data: Annotated[str, Arg("FOLDER|NAME", place="word")]
    """A folder, packed or with pictures, archives or CSV files, an archive, or the name of a data set."""
    workers: Workers = None
    """Processes that decode (one per core unless given)."""
    data_dir: Path | None = None
    """The folder of the data sets with a name (data unless given)."""


@dataclass(frozen=True)
class Fetch:
    """Download cifar10, cifar100 or fashion-mnist and verify its checksum, if it is not there.

    Compute nodes of a cluster often have no internet: run this on the login node before you submit.
    """

    name: Annotated[str | None, Arg("NAME|RECIPE", place="word", completes="recipe")] = None
    """The data set, or a recipe that needs it."""
    data_dir: Path | None = None
    """The folder of the data sets (data unless given)."""
    weights: bool = False
    """Also download the published ImageNet weights of the recipe's model."""
    model_name: str | None = None
    """Another model than the recipe's."""
    dataset: str | None = None
    """Another data set than the recipe's."""


def pack_pictures(settings: Pack) -> int:
    source, target, image_size = Path(settings.pictures), Path(settings.packed), settings.image_size or 224
    workers, unreadable = settings.workers or usable_cores(), settings.unreadable
    encoding = _encoding(settings)

    from paceline.data.pack import PackRequest, pack
    from paceline.runs.stores import is_url

    if is_url(settings.pictures) or is_url(settings.packed):
        got = settings.pictures if is_url(settings.pictures) else settings.packed
        raise UserError("packing reads and writes folders, not stores", got=got, hint="copy the data to a disk first")

    shard_bytes = settings.shard_mb * 2**20 if settings.shard_mb is not None else None
    began = time.perf_counter()
    with Progress("packed", "pictures") as progress:
        result = pack(PackRequest(source, target, image_size, workers, unreadable, shard_bytes, encoding), progress)
    packed = result.packed
    pictures = sum(packed.num_pictures(part) for part in packed.parts)
    made = f"{result.made} made in {time.perf_counter() - began:.1f} s" if result.made else "all of them up to date"
    print(
        f"{pictures:,} pictures of {len(packed.classes)} classes, {packed.describe_pictures()}, "
        f"{packed.size_bytes / 1e6:,.1f} MB in {len(packed.shards)} shards; {made}"
    )
    for name in packed.unreadable[:8]:
        print(f"unreadable, grey instead: {source / name}")
    if len(packed.unreadable) > 8:
        print(f"and {len(packed.unreadable) - 8} more")
    size = f" --image-size {image_size}" if encoding is None and image_size != 224 else ""
    print(f"train on it:  paceline train RECIPE --dataset folder --data-dir {target}{size}")
    return EXIT_FINISHED


def _encoding(settings: Pack) -> Encoding | None:
    """None for pixels. UserError for a flag that would have no effect."""
    is_encoded = settings.format == "encoded"
    unused = {
        "--image-size": is_encoded and settings.image_size is not None,
        "--max-side": not is_encoded and settings.max_side is not None,
        "--quality": settings.quality is not None and settings.max_side is None,
    }
    hints = {"--quality": "--format encoded --max-side N", "--max-side": "--format encoded"}
    for flag in (flag for flag, is_unused in unused.items() if is_unused):
        got = f"--format {settings.format}"
        raise UserError(f"{flag} has no effect", where=flag, got=got, hint=hints.get(flag, "leave it out"))
    if not is_encoded:
        return None
    return Encoding(settings.max_side or 0, settings.quality or Encoding.quality)


def check_data(settings: Check) -> int:
    from paceline.data.archives.places import has_archives
    from paceline.data.check import KNOWN, check_archives, check_known, check_packed, check_pictures, check_tables
    from paceline.data.parts import has_tables
    from paceline.runs.stores import is_url
    from paceline.settings.schema import DataConfig

    name, folder, workers = settings.data, Path(settings.data), settings.workers or usable_cores()
    if name in KNOWN and not folder.is_dir():
        found = check_known(name, settings.data_dir or _DATA_DIR)
    elif settings.data_dir is not None:
        raise UserError("--data-dir is for a data set with a name", got=name, allowed=", ".join(KNOWN))
    elif is_url(name) or has_archives(folder):
        with Progress("checked", "pictures") as progress:
            found = check_archives(DataConfig(dataset="folder", data_dir=name), workers, progress)
    elif not folder.is_dir():
        raise UserError(
            "there is no such folder, and no data set of that name",
            got=name,
            allowed=f"a folder, packed or with pictures or archives, an archive, or {', '.join(KNOWN)}",
        )
    elif is_packed(folder):
        with Progress("checked", "MB", unit=1e6) as progress:
            found = check_packed(folder, progress)
    elif has_tables(folder):
        with Progress("checked", "pictures") as progress:
            found = check_tables(folder, workers, progress)
    else:
        with Progress("checked", "pictures") as progress:
            found = check_pictures(folder, workers, progress)
    for line in found.lines:
        print(line)
    if found.unreadable is not None:
        raise found.unreadable
    print(f"whole: {found.what}; {found.proof}")
    return EXIT_FINISHED


def fetch(settings: Fetch) -> int:
    from paceline.data.check import KNOWN
    from paceline.settings.recipe_file import shipped_recipes

    name = settings.name or ""
    only_weights = not name and settings.weights and settings.model_name is not None
    if not name and not only_weights:
        raise UserError(
            "a data set or a recipe is missing",
            got="nothing",
            allowed=f"a recipe, or {', '.join(KNOWN)}",
            hint="paceline data fetch cifar10-vgg19 --weights",
        )
    if name in KNOWN and not settings.weights and settings.model_name is None and settings.dataset is None:
        _fetch_data(name, settings.data_dir or _DATA_DIR)
        return EXIT_FINISHED
    if name and not name.endswith((".yaml", ".yml")) and name not in shipped_recipes():
        close = difflib.get_close_matches(name, [*KNOWN, *shipped_recipes()], n=1)
        raise UserError(
            "there is no data set and no recipe of this name",
            got=name,
            allowed=f"{', '.join(KNOWN)}, a recipe (paceline recipes lists them) or FILE.yaml",
            hint=f"paceline data fetch {close[0]}" if close else "shapes and synthetic are generated, not downloaded",
        )
    _fetch_for_recipe(name, settings)
    return EXIT_FINISHED


def _fetch_for_recipe(recipe: str, settings: Fetch) -> None:
    from paceline.data.check import KNOWN
    from paceline.models.external import is_of_collection
    from paceline.settings.load import load_config
    from paceline.settings.recipe_file import DEFAULT_RECIPE

    given = {"--data-dir": settings.data_dir, "--model-name": settings.model_name, "--dataset": settings.dataset}
    flags = [f"{flag}={value}" for flag, value in given.items() if value is not None]
    config = load_config(recipe or DEFAULT_RECIPE, flags).config
    data = config.data
    if recipe and data.dataset in KNOWN:
        _fetch_data(data.dataset, Path(data.data_dir))
    elif recipe:
        source = "generated" if data.dataset in ("shapes", "synthetic") else "your own data"
        print(f"{data.dataset}: {source}, not downloaded")
    if settings.weights:
        from paceline.models.fetch_weights import fetch_weights

        print(f"weights of {config.model.model_name}: {fetch_weights(config.model)}")
    elif config.model.weights == "imagenet" or is_of_collection(config.model.weights):
        print(f"the recipe also needs weights: paceline data fetch {recipe} --weights")


def _fetch_data(name: str, data_dir: Path) -> None:
    from paceline.data.check import describe_known

    print(f"{name} in {data_dir}: {describe_known(name, data_dir)}")


class Progress:
    """A bar on a terminal, a line every few seconds elsewhere."""

    def __init__(self, verb: str, things: str, unit: float = 1.0) -> None:
        self._verb, self._things, self._unit = verb, things, unit
        self._bar: Any = None
        self.total = self._done = self._first = 0
        self._began = self._told = 0.0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
        if isinstance(error, KeyboardInterrupt) and self._verb == "packed":
            print("stopped; the same command continues", file=sys.stderr)

    def start(self, total: int, done: int) -> None:
        self.total, self._done, self._first = total, done, done
        self._began = time.perf_counter()
        if done:
            print(f"continuing: {self._amount(done)} of {self._amount(total)} {self._things} are there already")
        if sys.stdout.isatty():
            from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

            columns = (BarColumn(), TaskProgressColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            self._bar = Progress(*columns, transient=True)
            self._task = self._bar.add_task("starting", total=total, completed=done)
            self._bar.start()

    def advance(self, by: int) -> None:
        self._done += by
        now = time.perf_counter()
        rate = (self._done - self._first) / max(now - self._began, 1e-9)
        done, total, speed = map(self._amount, (self._done, self.total, rate))
        text = f"{done}/{total} {self._things}, {speed} {self._things}/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description=text)
        elif now - self._told >= _LINE_EVERY_S or self._done == self.total:
            self._told = now
            print(f"{self._verb} {text}, {(self.total - self._done) / max(rate, 1e-9):.0f} s to go", flush=True)

    def _amount(self, count: float) -> str:
        return f"{count / self._unit:,.0f}"


COMMANDS = (
    Command("data pack", Pack, pack_pictures),
    Command("data check", Check, check_data),
    Command("data fetch", Fetch, fetch),
)
