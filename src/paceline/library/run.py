"""`paceline.load_run(...)` and the run it returns: its files, and its model."""

from __future__ import annotations

import html
import os
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from paceline.data.array_folder import ARRAYS
from paceline.errors import UserError
from paceline.library.run_inputs import stored_arrays
from paceline.library.table import Table
from paceline.metrics.recorder import read_rows
from paceline.runs.catalog import find_run, read_entry
from paceline.runs.folder import RunFolder, require_run_folder
from paceline.runs.json_files import RESULTS, read_object
from paceline.runs.trust import trusting_code
from paceline.settings.load import load_config
from paceline.settings.schema import Config
from paceline.training.export_request import check_format, check_output, check_packages, default_output

if TYPE_CHECKING:
    from torch import Tensor, nn

    from paceline.library.predictions import Images, OpenModel, Prediction
    from paceline.training.evaluate import Evaluation


_ONE_AT_A_TIME = threading.RLock()  # these settings belong to the process, not to a thread
# The first is set for runs with --exact or --deterministic, the second by torch when its compiler is imported.
_VARIABLES = ("CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_CACHE_DIR")
_PHASES = ("train", "val", "test", "step")


# Keeps the settings of the caller's process when a run's model is built or evaluated in it.


@contextmanager
def caller_state_kept() -> Iterator[None]:
    """Restore random generators, the number of threads, filters of warnings, and what torch allows kernels to do.

    Modules that import torch are imported inside of it: torch adds a filter of warnings and a variable.

    Threads that use this wait for each other. A thread that draws random numbers meanwhile without it may get numbers
    of the run.
    """
    with _ONE_AT_A_TIME, warnings.catch_warnings():
        variables = {name: os.environ.get(name) for name in _VARIABLES}
        import numpy as np
        import torch

        from paceline.data.registry import forget_data

        python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
        devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
        is_deterministic = torch.are_deterministic_algorithms_enabled()
        only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
        try:
            yield
        finally:
            forget_data()  # the caller may change it before the next call
            random.setstate(python)
            np.random.set_state(numpy)
            torch.set_rng_state(cpu)
            if devices:
                torch.cuda.set_rng_state_all(devices)
            torch.set_num_threads(threads)
            torch.backends.cudnn.benchmark = benchmark
            torch.use_deterministic_algorithms(is_deterministic, warn_only=only_warns)
            for name, value in variables.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def load_run(folder_or_name: str | Path, *, trust_code: bool = False) -> Run:
    """A run by its folder, its name in `runs/` (or the beginning of it), or the job it was submitted as.

    Functions that the run names are executed only if you trained it on this machine, or with `trust_code=True`.
    """
    folder = find_run(str(folder_or_name))
    require_run_folder(folder.path)
    return Run(folder.path, trust_code=trust_code)


class Run:
    """A run folder. Files are read on access, so an active run can be watched."""

    def __init__(self, path: Path, *, trust_code: bool = False) -> None:
        self.path = path.absolute()  # stays valid if the notebook changes its working directory
        self._trust_code = trust_code
        self._best: tuple[list[tuple[Path, int]], OpenModel] | None = None

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def status(self) -> str:
        """running, finished, stopped, preempted, failed, ...: as `paceline runs` shows it."""
        return read_entry(self.path).state

    @property
    def config(self) -> Config:
        """Everything that defines the run: `run.config.train.epochs`."""
        return load_config(str(self._folder.config), []).config

    @property
    def results(self) -> dict[str, Any]:
        """results.json: `run.results["test_accuracy"]`. Empty before the run has finished."""
        return read_object(self._folder.results, RESULTS)

    @property
    def report(self) -> Path:
        """The page for a browser."""
        return self._folder.report

    def metrics(self, phase: str | None = None) -> Table:
        """A row per epoch and phase, or only those of one phase: train, val or test; `step` for logged steps."""
        if phase not in (None, *_PHASES):
            raise UserError("there is no such phase", where="run.metrics", got=phase, allowed=", ".join(_PHASES))
        kind = "step" if phase == "step" else "epoch"
        rows = [row for row in read_rows(self._folder.metrics_jsonl) if row["kind"] == kind]
        if phase in ("train", "val", "test"):
            rows = [row for row in rows if row.get("phase") == phase]
        return Table({name: value for name, value in row.items() if name not in ("kind", "ranks")} for row in rows)

    def model(self, checkpoint: str | int = "best", *, trust_code: bool = False) -> nn.Module:
        """The trained model, in eval mode on the CPU, from the best checkpoint, the latest, or that of a step.

        Its inputs are float and normalised as in training, like those that `run.predict` prepares.
        """
        with caller_state_kept():
            from paceline.library.predictions import open_model

            return open_model(self.path, checkpoint, trust_code=trust_code or self._trust_code).model

    @overload
    def predict(
        self, images: Images, *, logits: Literal[False] = False, transform: Callable[[Any], Any] | None = None
    ) -> list[Prediction]: ...

    @overload
    def predict(
        self, images: Images, *, logits: Literal[True], transform: Callable[[Any], Any] | None = None
    ) -> Tensor: ...

    def predict(
        self, images: Images, *, logits: bool = False, transform: Callable[[Any], Any] | None = None
    ) -> list[Prediction] | Tensor:
        """Label samples with the best weights: paths, PIL images, or arrays as in the training data, also one sample.

        A map-style data set works too; its labels are not used. With `logits` it returns the outputs of the model
        instead, a tensor [N, classes]. `transform` is applied to each sample first.
        """
        with caller_state_kept():
            from paceline.library.predictions import predict, predict_logits

            function = predict_logits if logits else predict
            return function(self._open_best(), images, transform)

    def export(self, format: str = "safetensors", output: str | Path | None = None, *, force: bool = False) -> Path:
        """Write the best weights for other programs: safetensors, torchscript, onnx or torch.export.

        Returns the folder: `output`, or export-FORMAT in the run folder. `force` replaces an earlier export.
        """
        with trusting_code(self._trust_code):
            check_format(format, where="run.export")
            folder = Path(output) if output is not None else default_output(self.path, format)
            check_output(folder, is_forced=force, hint="force=True, or another output=")
            check_packages(format, where=f"run.export({format!r})")
            with caller_state_kept():
                from paceline.training.export import export_run

                export_run(self.path, format, folder, [])
            return folder

    def checkpoints(self) -> Table:
        """A row per checkpoint, oldest first: step, path, validation accuracy and loss, and whether it is complete."""
        from paceline.checkpoints.named import list_checkpoints

        return Table(
            {
                "step": entry.state.get("step"),
                "path": str(entry.path),
                **{name: (entry.state.get("validation") or {}).get(name) for name in ("accuracy", "loss")},
                "is_complete": entry.damage is None and entry.unreadable is None,
            }
            for entry in list_checkpoints(self._folder.checkpoints, thorough=False)
        )

    def evaluate(
        self, data: Any = None, *, transform: Callable[[Any], Any] | None = None, accept_new_data: bool = False
    ) -> Evaluation:
        """Test the best weights in this process: on the run's test set, or on `data`.

        `data` is a pair of arrays (x, y) or a map-style data set with the classes of the run. The run's own data, if it
        has changed since the training, is refused, unless `accept_new_data`.
        """
        moved = self._moved_data()
        flags = [f"--data-dir={moved}"] if moved else []
        flags += ["--accept-new-data"] if accept_new_data else []
        with caller_state_kept():
            from paceline.library.data_objects import read_test_objects
            from paceline.training.reuse import evaluate_run, open_run

            opened = open_run(self.path, flags, trust_code=self._trust_code)
            if data is None:
                return evaluate_run(opened)
            return evaluate_run(
                opened, read_test_objects(data, opened.classes, transform, task=opened.record.info.task)
            )

    def source(self, checkpoint: str | int = "best") -> dict[str, str]:
        """The source of the run's functions, stored in a checkpoint: text by file name. Nothing is executed."""
        with caller_state_kept():
            from paceline.training.reuse import stored_source

            return stored_source(self.path, checkpoint)

    def resume(self, *, quiet: bool = False, **flags: Any) -> Run:
        """Continue this run in its folder. `epochs=20` makes a finished run longer."""
        from paceline.library.train import train

        moved = None if flags.get("data") is not None else self._moved_data()
        settings = {"resume": "auto", "data_dir": moved, **flags}
        return train(self._folder.config, output_dir=self.path, quiet=quiet, trust_code=self._trust_code, **settings)

    def _moved_data(self) -> Path | None:
        """The folder of the arrays, if the run folder was moved or copied."""
        data = self.config.data
        return stored_arrays(self.path, data.data_dir) if data.dataset == ARRAYS else None

    @property
    def _folder(self) -> RunFolder:
        return RunFolder(self.path)

    def _open_best(self) -> OpenModel:
        """The best weights. They stay loaded until the run has better ones: it may train or be resumed meanwhile."""
        from paceline.library.predictions import open_model

        folders = [(self._folder.checkpoints / name).resolve() for name in ("best", "latest")]
        mark = [(folder, folder.stat().st_mtime_ns) for folder in folders if folder.is_dir()][:1]
        if self._best is None or self._best[0] != mark:
            self._best = mark, open_model(self.path, "best", trust_code=self._trust_code)
        return self._best[1]

    def __repr__(self) -> str:
        return f"<Run {self.name}: {self._in_words()}>"

    def _repr_html_(self) -> str:
        """For notebooks."""
        return f"<b>{html.escape(self.name)}</b>: {self._in_words()} (<code>{html.escape(str(self.path))}</code>)"

    def _in_words(self) -> str:
        entry = read_entry(self.path)
        accuracy = f", {entry.test_accuracy:.2%} test accuracy" if entry.test_accuracy is not None else ""
        if entry.test_metric and entry.test_value is not None:
            accuracy = f", test {entry.test_metric} {entry.test_value:.4g}"
        return f"{entry.state}, step {entry.step}{accuracy}" if entry.step is not None else entry.state
