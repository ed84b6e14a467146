"""`paceline clean`: remove checkpoints that are not needed, or whole runs. Lists them first, and asks."""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass, replace
from typing import Annotated

from paceline.checkpoints.reclaim import Reclaim, plan_reclaim, reclaim
from paceline.cli.command import Command
from paceline.cli.selected_runs import RunFilter
from paceline.errors import EXIT_FINISHED, EXIT_INTERRUPTED, UserError
from paceline.runs.catalog import LIVING, RunEntry, find_run, list_runs, read_entry
from paceline.settings.declare import Arg
from paceline.settings.values import Setting, invalid

_KEEP = "keep"
_AGE = re.compile(r"(\d+)([mhdw])")
_UNIT_S = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def parse_age_s(text: str, setting: Setting) -> float:
    """7d in seconds."""
    match = _AGE.fullmatch(text)
    if match is None:
        raise invalid(setting, text, "30m, 12h, 7d or 2w")
    return int(match[1]) * _UNIT_S[match[2]]


@dataclass(frozen=True)
class Clean(RunFilter):
    """Free disk space: remove the checkpoints of runs that are not needed any more.

    A finished run keeps its best checkpoint, one that can be resumed its newest too. Results, metrics, logs and the
    page always stay. Give runs, or flags that choose them: a run must match all of them. Runs that are running, or may
    be, are left alone; so are runs with the tag keep, unless they are named. Copies in object stores stay.
    """

    run: Annotated[tuple[str, ...], Arg(place="word", completes="run")] = ()
    """Run folders, or their names in runs/."""
    older_than: Annotated[float | None, Arg("AGE", parse=parse_age_s)] = None
    """Only runs that have not changed for this long: 30m, 12h, 7d or 2w."""
    failed: bool = False
    """Only runs that are failed or lost."""
    all: bool = False
    """Remove whole run folders."""
    dry_run: bool = False
    """Only list what would be removed."""
    yes: bool = False
    """Do not ask."""

    @property
    def chosen_by(self) -> list[str]:
        """The flags that choose runs."""
        given = {"--older-than": self.older_than is not None, "--failed": self.failed, "--status": bool(self.status)}
        given |= {"--recipe": self.recipe is not None, "--tag": self.tag is not None}
        return [flag for flag, is_given in given.items() if is_given]


def clean(settings: Clean) -> int:
    entries = _named(settings) if settings.run else _chosen(settings)
    plans = [plan_reclaim(entry, whole=settings.all) for entry in entries]
    plans = [plan for plan in plans if not plan.is_nothing]
    if not plans:
        count = f"{len(entries)} run{'s' if len(entries) > 1 else ''}"
        more = f": {count} without checkpoints to remove; --all removes whole run folders" if entries else ""
        print(f"nothing to free{'' if settings.all else more}")
        return EXIT_FINISHED
    _show(plans)
    if settings.dry_run:
        return EXIT_FINISHED
    if not settings.yes and not _is_confirmed(plans, whole=settings.all):
        print("nothing was removed")
        return EXIT_INTERRUPTED
    return _remove(plans)


def _named(settings: Clean) -> list[RunEntry]:
    """Each run once, even if it is named twice."""
    extra = settings.chosen_by or (["--in"] if settings.folder is not None else [])
    if extra:
        got = f"{' '.join(settings.run)} with {extra[0]}"
        raise UserError("give runs, or flags that choose them", got=got, hint="leave one out")
    entries = [read_entry(find_run(word).path) for word in settings.run]
    return list({entry.path.resolve(): entry for entry in entries}.values())


def _chosen(settings: Clean) -> list[RunEntry]:
    if not settings.chosen_by:
        raise UserError("no runs are chosen", allowed="RUN..., or flags that choose them", hint="--older-than 7d")
    if settings.failed and settings.status:
        raise UserError("--failed is --status failed,lost", hint="leave one of them out")
    if settings.failed:
        settings = replace(settings, status=("failed", "lost"))
    now = time.time()
    entries = settings.choose(list_runs(settings.root))
    kept = [entry for entry in entries if _KEEP in entry.notes.tags and settings.tag != _KEEP]
    if kept:
        print(f"left alone: {len(kept)} with the tag {_KEEP}")
    older_s = settings.older_than or 0.0
    return [e for e in entries if e not in kept and e.state not in LIVING and now - e.updated >= older_s]


def _show(plans: list[Reclaim]) -> None:
    widest = max(len(str(plan.entry.path)) for plan in plans)
    for plan in plans:
        count = len(plan.folders)
        what = "the whole run" if plan.is_whole else f"{count} checkpoint" + ("s" if count > 1 else "")
        stays = "" if plan.is_whole else f"; {plan.kept} stays" if " and " not in plan.kept else f"; {plan.kept} stay"
        print(f"{plan.entry.path!s:<{widest}}  {plan.entry.state:<9}  {in_bytes(plan.size_bytes):>9}  {what}{stays}")
    print(f"{len(plans)} run{'s' if len(plans) > 1 else ''}, {in_bytes(sum(plan.size_bytes for plan in plans))}")


def _is_confirmed(plans: list[Reclaim], *, whole: bool) -> bool:
    if not sys.stdin.isatty():
        raise UserError("a confirmation is needed, and this is not a terminal", hint="--yes, or --dry-run")
    what = f"Remove {len(plans)} whole run{'s' if len(plans) > 1 else ''}" if whole else "Remove these checkpoints"
    try:
        return input(f"{what}? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False


def _remove(plans: list[Reclaim]) -> int:
    freed = 0
    for plan in plans:
        try:
            freed += reclaim(plan)
        except UserError as error:  # it has just been started; the others are removed
            print(f"left alone: {plan.entry.path}: {error.what}")
    print(f"{in_bytes(freed)} freed")
    return EXIT_FINISHED


def in_bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


COMMANDS = (Command("clean", Clean, clean, helps_without_arguments=True),)
