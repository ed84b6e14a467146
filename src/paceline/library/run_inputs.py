"""Files that a call of `paceline.train` writes into the run folder before the ranks start. A refused call removes them.

    functions.py         the source of functions that ranks cannot import
    arrays/DIGEST/       the data of the call, one folder for each set of arrays
    initial.safetensors  the weights of a model that was given as an instance

They stay with the run, for a resume and for `run.evaluate()`.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.data.array_folder import ARRAYS
from paceline.errors import UserError
from paceline.runs.folder import RunFolder, has_checkpoint
from paceline.settings.small_files import not_plain, write_plain

if TYPE_CHECKING:
    from torch import nn

    from paceline.library.data_objects import DataObjects

SOURCE_FILE = "functions.py"
WEIGHTS_FILE = "initial.safetensors"


class RunInputs:
    """The input files of one call. A run that is under way reads its files again when it restarts: it is refused."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()
        self._is_new_folder = not folder.exists()
        self._had_checkpoint = has_checkpoint(folder)
        self._before: dict[Path, bytes | None] = {}  # replaced files
        self._new_arrays: Path | None = None

    def write_source(self, source: str) -> Path:
        file = self._folder / SOURCE_FILE
        content = source.encode()
        before = self._prepare(file)
        if before not in (None, content) and not RunFolder(self._folder).holds_a_run:
            raise UserError(
                f"this folder holds a {SOURCE_FILE} that is no run's", where=str(file), hint="another output_dir"
            )
        self._before[file] = before
        write_plain(file, content)
        return file

    def write_weights(self, module: nn.Module) -> Path:
        from safetensors.torch import save

        from paceline.library.modules import weights_of

        file = self._folder / WEIGHTS_FILE
        self._before[file] = self._prepare(file)
        write_plain(file, save(weights_of(module)))
        return file

    def write_arrays(self, objects: DataObjects) -> Path:
        """The folder of the arrays. Arrays that an earlier call has written are used again."""
        from paceline.data.sources.arrays import write_arrays

        self._prepare(self._folder / SOURCE_FILE)
        parent = self._folder / ARRAYS
        if parent.is_symlink() or (parent.exists() and not parent.is_dir()):
            raise not_plain(parent)
        known = set(parent.iterdir()) if parent.exists() else set()
        written = write_arrays(objects.data, objects.header, parent)
        self._new_arrays = None if written in known else written
        return written

    def _prepare(self, file: Path) -> bytes | None:
        """Create the folder, and return the content of a file that will be replaced."""
        RunFolder(self._folder).refuse_if_owned()
        if file.is_symlink() or (file.exists() and not file.is_file()):
            raise not_plain(file)
        self._folder.mkdir(parents=True, exist_ok=True)
        return file.read_bytes() if file.exists() else None

    def undo(self) -> None:
        """After a refusal: the run in this folder keeps its files. A run that has started to train keeps its own."""
        for file, content in self._before.items():
            if content is not None:
                write_plain(file, content)
        if not self._had_checkpoint and has_checkpoint(self._folder):
            return
        if self._new_arrays is not None:
            shutil.rmtree(self._new_arrays, ignore_errors=True)
        with suppress(OSError):
            (self._folder / ARRAYS).rmdir()
        if self._is_new_folder and not RunFolder(self._folder).holds_a_run:
            for file in self._before:
                file.unlink(missing_ok=True)
            with suppress(OSError):
                self._folder.rmdir()


def stored_arrays(folder: Path, data_dir: str) -> Path | None:
    """The arrays in a run folder that was moved or copied: `data_dir` is their place when the run was trained."""
    inside = folder / ARRAYS / Path(data_dir).name
    return inside if inside.is_dir() and not Path(data_dir).is_dir() else None
