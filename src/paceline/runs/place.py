"""Which folder a run writes to, and what it goes on from. Decided once, by one process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.config.load import LoadedConfig
from paceline.errors import UserError
from paceline.runs.folder import RunFolder, locate_checkpoint, new_run_folder, newest_run_folder


@dataclass(frozen=True)
class RunPlace:
    folder: Path
    resume_from: Path | None  # a run folder or a checkpoint in one


def decide_place(loaded: LoadedConfig) -> RunPlace:
    """Turn output_dir and resume into paths; nothing is created yet."""
    run = loaded.config.run
    given = Path(run.output_dir) if run.output_dir else None
    if given is not None and given.exists() and not given.is_dir():
        raise UserError("output_dir is a file", where=loaded.where("output_dir"), got=run.output_dir)
    if not run.resume:
        name = loaded.recipe_name + ("-rehearsal" if run.rehearse else "")
        folder = given or new_run_folder(name)
        if RunFolder(folder).holds_a_run:
            raise UserError(
                "this folder already holds a run",
                where=str(folder),
                hint="--resume auto to go on with it, or another --output-dir",
            )
        return RunPlace(folder, None)
    if run.resume == "auto":
        own = loaded.recipe_path.parent if loaded.recipe_path.name == "config.yaml" else None
        folder = given or own or newest_run_folder(loaded.recipe_name) or new_run_folder(loaded.recipe_name)
        has_checkpoint = (RunFolder(folder).checkpoints / "latest").exists()
        return RunPlace(folder, folder if has_checkpoint else None)
    source = Path(run.resume)
    if locate_checkpoint(source) is None:
        raise UserError(
            "there is nothing to resume from: no checkpoint here",
            where=loaded.where("resume"),
            got=run.resume,
            allowed="auto, a run folder, or one of its checkpoints/step-*, latest or best",
        )
    return RunPlace(given or _owner_of(source), source)


def _owner_of(source: Path) -> Path:
    """The run folder of a path given to --resume: itself, or the one around its checkpoints folder."""
    for path in (source, *source.absolute().parents):
        if path.name == "checkpoints":
            return path.parent
    return source
