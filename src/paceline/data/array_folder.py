"""A folder of arrays: the data of `paceline.train(data=(x, y))`, for the ranks. Names and header; imports no numpy.

    arrays.json                          classes, task, and shape and type of each part
    train-samples.npy  train-labels.npy  the same for validation and test

The header is written last and the folder gets its name by a rename, so a folder with its name is complete. The name is
a digest of everything in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.data.parts import PARTS, TEST, TRAIN
from paceline.errors import DataError
from paceline.runs.json_files import Fields, ListOf, MapOf, Number, Word, fit
from paceline.settings.small_files import read_json_object
from paceline.settings.tasks import REGRESSION, SINGLE_LABEL, TASKS
from paceline.settings.text import check_text

ARRAYS = "arrays"  # the name of the data set, and of its folder in a run folder
HEADER = "arrays.json"
HELD_OUT = "held out of data"
_LARGEST_HEADER_BYTES = 100_000_000  # a million class names
_SIZE = Number(1, 2**48, is_whole=True)
_SHAPE = Fields(
    required={
        "schema_version": Number(1, 1, is_whole=True),
        "classes": ListOf(str),
        "parts": MapOf(Fields(required={"shape": ListOf(_SIZE), "dtype": Word(("uint8", "float32"))})),
        "is_test_held_out": bool,
    },
    optional={"task": Word(TASKS)},
)


@dataclass(frozen=True)
class ArrayPart:
    shape: tuple[int, ...]  # of all samples: (N, C, H, W) or (N, D)
    dtype: str


@dataclass(frozen=True)
class ArrayHeader:
    classes: tuple[str, ...]
    parts: dict[str, ArrayPart]
    is_test_held_out: bool
    task: str = SINGLE_LABEL

    @property
    def origins(self) -> tuple[tuple[str, str], ...]:
        """Where the samples of each part are from, for the header of a run."""
        own = dict.fromkeys(self.parts, "own set") | {TRAIN: "data"}
        return tuple((own | {TEST: HELD_OUT} if self.is_test_held_out else own).items())


def samples_file(part: str) -> str:
    return f"{part}-samples.npy"


def labels_file(part: str) -> str:
    return f"{part}-labels.npy"


def read_header(folder: Path) -> ArrayHeader:
    """DataError if it is not such a folder, or incomplete."""
    try:
        values = fit(read_json_object(folder / HEADER, _LARGEST_HEADER_BYTES), _SHAPE)
        task = values.get("task", SINGLE_LABEL)
        least = 1 if task == REGRESSION else 2
        parts = {name: ArrayPart(tuple(part["shape"]), part["dtype"]) for name, part in values["parts"].items()}
        if not set(parts) <= set(PARTS) or not {TRAIN, TEST} <= set(parts) or len(values["classes"]) < least:
            raise ValueError("parts or classes are missing")
        if any(len(part.shape) not in (2, 4) for part in parts.values()):
            raise ValueError("a part is neither images nor vectors")
    except (OSError, ValueError) as error:
        got = error.strerror if isinstance(error, OSError) else error
        raise DataError(
            "there are no arrays in this folder",
            where=str((folder / HEADER).absolute()),
            got=got,
            allowed="a folder that paceline.train wrote from arrays: RUN/arrays/NAME",
            hint="give the data again: paceline.train(data=(x, y), output_dir=RUN, resume='auto', ...)",
        ) from error
    where = str(folder / HEADER)
    classes = tuple(check_text(name, "the name of a class", where=where) for name in values["classes"])
    return ArrayHeader(classes, parts, values["is_test_held_out"], task)


def header_json(header: ArrayHeader) -> dict[str, object]:
    parts = {name: {"shape": list(part.shape), "dtype": part.dtype} for name, part in header.parts.items()}
    return {
        "schema_version": 1,
        "classes": list(header.classes),
        "parts": parts,
        "is_test_held_out": header.is_test_held_out,
        **({"task": header.task} if header.task != SINGLE_LABEL else {}),
    }
