"""The same training with ranks that Metaflow's @torchrun starts. Needs a disk that all nodes share.

There is no supervisor, and the nodes are not connected. If one dies, the others end by torch's own timeouts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from metaflow import current

from paceline.checkpoints.uploader import CheckpointUploader
from paceline.integrations.metaflow.datastore import MetaflowDatastore
from paceline.integrations.metaflow.request import Request
from paceline.integrations.metaflow.steps import Trained, collect_results, one_screen, print_start
from paceline.runs.folder import RunFolder, has_checkpoint
from paceline.runs.interpreter import has_working_folder, safe_path


@contextmanager
def training_by_torchrun(request: Request) -> Iterator[Trained | None]:
    """Train on this node. Yields the results on the main node, None on the others."""
    base = Path(request.work_dir).absolute() / f"{current.flow_name}-{current.run_id}"
    folder, recipe = RunFolder(base / "run"), base / f"{request.name}.yaml"
    is_main = current.parallel.node_index == 0
    uploader: CheckpointUploader | None = None
    with one_screen(is_final=True):
        folder.create()
        if is_main:
            keys, _ = print_start(request)
            datastore = MetaflowDatastore(
                folder, current.checkpoint, request.about, best_is_latest=request.best_is_latest
            )
            if not has_checkpoint(folder.path):  # the disk of an earlier attempt may be lost
                datastore.fetch(keys)
            uploader = CheckpointUploader(folder, datastore)
    if uploader is not None:
        uploader.start()
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
        if uploader is not None:
            uploader.close()
    yield collect_results(request, folder) if is_main else None


def _flags(request: Request, folder: RunFolder) -> list[str]:
    flags = [f"--output-dir={folder.path}", "--resume=auto"]
    return [*flags, "--best-is-latest"] if request.best_is_latest else flags
