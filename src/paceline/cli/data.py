"""`paceline data pack|check|fetch`: pictures made fast, data sets verified, and brought here."""

from __future__ import annotations

import difflib
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.data.pack_format import is_packed
from paceline.errors import EXIT_FINISHED, UserError
from paceline.runtime.cores import usable_cores

_USAGE = """\
usage: paceline data pack PICTURES PACKED [--image-size 224] [--unreadable 0] [--workers N] [--shard-mb N]
       paceline data check FOLDER         [--workers N]
       paceline data check NAME           [--data-dir data]
       paceline data fetch NAME           [--data-dir data]
       paceline data fetch RECIPE         [--data-dir data] [--weights] [--model-name NAME]

pack   Decode the pictures of a folder once (PICTURES/train/CLASS/*, PICTURES/test/CLASS/* and, if it is there,
       PICTURES/val/CLASS/*; or PICTURES/CLASS/*) and write them to the new folder PACKED, as plain pixels that
       training maps into memory. Then:
           paceline train RECIPE --dataset folder --data-dir PACKED
       trains on them with the same result as on PICTURES, bit for bit, and decodes nothing. Each picture's shorter
       side is scaled to 8/7 of --image-size (256 for 224) and its central square kept, as training would do it.
       Stopped or killed, the same command goes on where it was. When pictures have changed, it packs those shards
       again.
check  Is a data set whole? A packed folder: every byte against its CRC-32. A folder of pictures: each is decoded, and
       the command lists which folder is used for what, which files are skipped and which pictures are suspicious.
       cifar10, fashion-mnist: against their checksums. Exit code 3 if something is damaged; it is named.
fetch  Download cifar10 or fashion-mnist, with its checksum, if it is not there: by its name, or by a recipe that needs
       it. --weights also fetches the published ImageNet weights of the recipe's model. Compute nodes of a cluster
       often have no internet, so run it on the login node before you submit.

--image-size N   side of the model's input, as in training
--unreadable N   pictures that may turn out to be unreadable: grey ones take their places
--workers N      processes that decode; by default one per core
--shard-mb N     size of a file; by default 64 MB, or 1/256 of a very large set
--data-dir PATH  where data sets with a name lie
--weights        fetch the model's weights too
--model-name N   another model than the recipe's; --dataset N: another data set
"""
_VERBS = ("pack", "check", "fetch")
_FLAGS = {
    "pack": ("--image-size", "--unreadable", "--workers", "--shard-mb"),
    "check": ("--workers", "--data-dir"),
    "fetch": ("--data-dir", "--weights", "--model-name", "--dataset"),
}
_SWITCHES = ("--weights",)
_RANGES = {"--image-size": (8, 2048), "--unreadable": (0, 10**9), "--workers": (1, 256), "--shard-mb": (1, 65536)}
_LINE_EVERY_S = 2.0


def run(arguments: list[str]) -> int:
    if not arguments or {"-h", "--help"} & set(arguments):
        print(_USAGE, end="")
        return EXIT_FINISHED
    verb, *rest = arguments
    if verb not in _VERBS:
        close = difflib.get_close_matches(verb, _VERBS, n=1)
        hint = " ".join(["paceline data", close[0] if close else "pack", *rest])
        raise UserError(f"paceline data knows no {verb!r}", allowed=", ".join(_VERBS), hint=hint)
    words, flags = _parse(verb, rest)
    return {"pack": _pack, "check": _check, "fetch": _fetch}[verb](words, flags)


def _parse(verb: str, arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """Words, and flags with their values, as --flag value or --flag=value."""
    words, flags, given = [], {}, list(arguments)
    while given:
        token = given.pop(0)
        if not token.startswith("-"):
            words.append(token)
            continue
        name, has_value, value = token.partition("=")
        if name not in _FLAGS[verb]:
            close = difflib.get_close_matches(name, _FLAGS[verb], n=1)
            hint = f"did you mean {close[0]}?" if close else None
            raise UserError(f"unknown flag {name!r}", allowed=", ".join(_FLAGS[verb]), hint=hint)
        if name in _SWITCHES:
            if has_value:
                raise UserError(f"{name} takes no value", got=token, hint=name)
            flags[name] = "true"
            continue
        if not has_value and not given:
            raise UserError(f"{name} needs a value")
        flags[name] = value if has_value else given.pop(0)
    return words, flags


def _number(flags: dict[str, str], name: str, default: int) -> int:
    low, high = _RANGES[name]
    text = flags.get(name, str(default))
    if not (text.isascii() and text.isdecimal() and low <= int(text) <= high):
        raise UserError("this is not a number that fits", where=f"flag {name}", got=text, allowed=f"{low} to {high}")
    return int(text)


def _pack(words: list[str], flags: dict[str, str]) -> int:
    if len(words) != 2:
        named = [words[0], f"{words[0].rstrip('/')}-packed"] if words else ["PICTURES", "PACKED"]
        raise UserError(
            "pack what, and where to?",
            got=" ".join(words) or "nothing",
            allowed="a folder of pictures and a new folder",
            hint=f"paceline data pack {' '.join(named)}",
        )
    source, target = Path(words[0]), Path(words[1])
    image_size = _number(flags, "--image-size", 224)
    shard_mb = _number(flags, "--shard-mb", 64)
    workers, unreadable = _number(flags, "--workers", usable_cores()), _number(flags, "--unreadable", 0)

    from paceline.data.pack import PackRequest, pack

    shard_bytes = shard_mb * 2**20 if "--shard-mb" in flags else None
    began = time.perf_counter()
    with _Progress("packed", "pictures") as progress:
        result = pack(PackRequest(source, target, image_size, workers, unreadable, shard_bytes), progress)
    packed = result.packed
    pictures = sum(packed.num_pictures(part) for part in packed.parts)
    made = f"{result.made} made in {time.perf_counter() - began:.1f} s" if result.made else "all of them up to date"
    print(
        f"{pictures:,} pictures of {len(packed.classes)} classes, {packed.side} x {packed.side} pixels, "
        f"{packed.size_bytes / 1e6:,.1f} MB in {len(packed.shards)} shards; {made}"
    )
    for name in packed.unreadable[:8]:
        print(f"unreadable, grey instead: {source / name}")
    if len(packed.unreadable) > 8:
        print(f"and {len(packed.unreadable) - 8} more")
    size = f" --image-size {image_size}" if image_size != 224 else ""
    print(f"train on it:  paceline train RECIPE --dataset folder --data-dir {target}{size}")
    return EXIT_FINISHED


def _check(words: list[str], flags: dict[str, str]) -> int:
    if len(words) != 1:
        raise UserError("check what?", got=" ".join(words) or "nothing", hint="paceline data check FOLDER")
    from paceline.data.check import KNOWN, check_known, check_packed, check_pictures

    name, folder, workers = words[0], Path(words[0]), _number(flags, "--workers", usable_cores())
    if name in KNOWN and not folder.is_dir():
        found = check_known(name, Path(flags.get("--data-dir", "data")))
    elif "--data-dir" in flags:
        raise UserError("--data-dir goes with a name", got=name, allowed=", ".join(KNOWN))
    elif not folder.is_dir():
        raise UserError(
            "there is no such folder, and no data set of that name",
            got=name,
            allowed=f"a folder, packed or with pictures, or {', '.join(KNOWN)}",
        )
    elif is_packed(folder):
        with _Progress("checked", "MB", unit=1e6) as progress:
            found = check_packed(folder, progress)
    else:
        with _Progress("checked", "pictures") as progress:
            found = check_pictures(folder, workers, progress)
    for line in found.lines:
        print(line)
    if found.unreadable is not None:
        raise found.unreadable
    print(f"whole: {found.what}; {found.proof}")
    return EXIT_FINISHED


def _fetch(words: list[str], flags: dict[str, str]) -> int:
    from paceline.data.check import KNOWN
    from paceline.settings.recipe_file import shipped_recipes

    only_weights = not words and {"--weights", "--model-name"} <= set(flags)
    if len(words) != 1 and not only_weights:
        raise UserError(
            "fetch what?",
            got=" ".join(words) or "nothing",
            allowed=f"a recipe, or {', '.join(KNOWN)}",
            hint="paceline data fetch cifar10-vgg19 --weights",
        )
    if words and words[0] in KNOWN and not {"--weights", "--model-name", "--dataset"} & set(flags):
        _fetch_data(words[0], Path(flags.get("--data-dir", "data")))
        return EXIT_FINISHED
    if words and not words[0].endswith((".yaml", ".yml")) and words[0] not in shipped_recipes():
        close = difflib.get_close_matches(words[0], [*KNOWN, *shipped_recipes()], n=1)
        raise UserError(
            "there is no data set and no recipe of this name",
            got=words[0],
            allowed=f"{', '.join(KNOWN)}, a recipe (paceline recipes lists them) or FILE.yaml",
            hint=f"paceline data fetch {close[0]}" if close else "shapes and synthetic are made, not fetched",
        )
    _fetch_for_recipe(words[0] if words else "", flags)
    return EXIT_FINISHED


def _fetch_for_recipe(recipe: str, flags: dict[str, str]) -> None:
    from paceline.data.check import KNOWN
    from paceline.launch.request import DEFAULT_RECIPE
    from paceline.settings.load import load_config

    given = [f"{name}={value}" for name, value in flags.items() if name not in _SWITCHES]
    config = load_config(recipe or DEFAULT_RECIPE, given).config
    data = config.data
    if recipe and data.dataset in KNOWN:
        _fetch_data(data.dataset, Path(data.data_dir))
    elif recipe:
        source = "made, not fetched" if data.dataset in ("shapes", "synthetic") else "yours, not fetched"
        print(f"{data.dataset}: {source}")
    if "--weights" in flags:
        from paceline.models.fetch_weights import fetch_weights

        print(f"weights of {config.model.model_name}: {fetch_weights(config.model)}")
    elif config.model.weights == "imagenet":
        print(f"the recipe also needs weights: paceline data fetch {recipe} --weights")


def _fetch_data(name: str, data_dir: Path) -> None:
    from paceline.data.check import describe_known

    print(f"{name} in {data_dir}: {describe_known(name, data_dir)}")


class _Progress:
    """A bar on a terminal, a line every few seconds elsewhere."""

    def __init__(self, verb: str, things: str, unit: float = 1.0) -> None:
        self._verb, self._things, self._unit = verb, things, unit
        self._bar: Any = None
        self.total = self._done = self._first = 0
        self._began = self._told = 0.0

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
        if isinstance(error, KeyboardInterrupt) and self._verb == "packed":
            print("stopped; the same command goes on from here", file=sys.stderr)

    def start(self, total: int, done: int) -> None:
        self.total, self._done, self._first = total, done, done
        self._began = time.perf_counter()
        if done:
            print(f"going on: {self._amount(done)} of {self._amount(total)} {self._things} are there already")
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
        text = f"{self._amount(self._done)}/{self._amount(self.total)} {self._things}, {self._amount(rate)}/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, description=text)
        elif now - self._told >= _LINE_EVERY_S or self._done == self.total:
            self._told = now
            print(f"{self._verb} {text}, {(self.total - self._done) / max(rate, 1e-9):.0f} s to go", flush=True)

    def _amount(self, count: float) -> str:
        return f"{count / self._unit:,.0f}"
