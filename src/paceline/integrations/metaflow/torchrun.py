"""The same training with ranks that Metaflow's @torchrun starts. Needs a disk that all nodes share.

There is no supervisor here and no line between the nodes: what ends the others when one dies are torch's own timeouts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from metaflow import current

from paceline.integrations.metaflow.courier import Courier
from paceline.integrations.metaflow.request import Request
from paceline.integrations.metaflow.steps import Trained, one_screen, outcome, tell_start
from paceline.runs.folder import RunFolder, has_checkpoint
from paceline.runs.interpreter import has_working_folder, safe_path


@contextmanager
def training_by_torchrun(request: Request) -> Iterator[Trained | None]:
    """Train as this node of the gang. Yields the outcome on the main node, None on the others."""
    base = Path(request.work_dir).absolute() / f"{current.flow_name}-{current.run_id}"
    folder, recipe = RunFolder(base / "run"), base / f"{request.name}.yaml"
    is_main = current.parallel.node_index == 0
    courier: Courier | None = None
    with one_screen(is_final=True):
        folder.create()
        if is_main:
            keys, _ = tell_start(request)
            courier = Courier(folder, current.checkpoint, request.about, request.best_is_latest)
            if not has_checkpoint(folder.path):  # an earlier attempt's disk may be gone
                courier.fetch(keys)
    if courier is not None:
        courier.start()
    recipe.write_text(request.recipe)
    try:
        with nullcontext() if has_working_folder() else safe_path():
            current.torch.run(
                entrypoint="-m",
                entrypoint_args=["paceline", "train", str(recipe), *_flags(request, folder)],
                nproc_per_node=request.processes_per_node,
            )
    finally:
        sys.stdout.flush()
        if courier is not None:
            courier.finish()
    yield outcome(request, folder) if is_main else None


def _flags(request: Request, folder: RunFolder) -> list[str]:
    flags = ["--output-dir", str(folder.path), "--resume", "auto"]
    return [*flags, "--best-is-latest"] if request.best_is_latest else flags
