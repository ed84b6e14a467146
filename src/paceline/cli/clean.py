"""`paceline clean`: free the disk of checkpoints nobody needs, or of whole runs. Shows what would go, and asks."""

from __future__ import annotations

import re
import sys
import time

from paceline.checkpoints.reclaim import Reclaim, plan_reclaim, reclaim
from paceline.cli.arguments import read_words
from paceline.cli.runs import choose, read_root
from paceline.errors import EXIT_FINISHED, EXIT_INTERRUPTED, UserError
from paceline.runs.catalog import LIVING, RunEntry, list_runs, read_entry
from paceline.runs.find import find_run

_USAGE = """\
usage: paceline clean RUN... [--all] [--dry-run] [--yes]
       paceline clean [--older-than 7d] [--failed] [--status S[,S]] [--recipe R] [--tag T] [--in DIR] [--all] ...

Free the disk. A finished run keeps its best checkpoint, one that can be resumed its newest too; results, metrics, logs
and the page always stay. --all removes whole run folders instead.
Which runs: those that are named, or those in runs/ (or below DIR) that all of the flags say. --failed: failed or lost.
--older-than takes a number of minutes (m), hours (h), days (d) or weeks (w).
Runs that are under way, or may be, are left alone; so are runs with the tag keep, unless they are named.
What would go is shown first, then it asks; --yes does not ask, --dry-run only shows. Copies in object stores stay.
"""
_SELECTIONS = ("--older-than", "--failed", "--status", "--recipe", "--tag")
_KEEP = "keep"
_AGE = re.compile(r"(\d+)([mhdw])")
_UNIT_S = {"m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


def run(arguments: list[str]) -> int:
    if not arguments or {"-h", "--help"} & set(arguments):
        print(_USAGE, end="")
        return EXIT_FINISHED
    words, flags = read_words(
        arguments,
        switches=("--all", "--yes", "--dry-run", "--failed"),
        valued=("--older-than", "--status", "--recipe", "--tag", "--in"),
    )
    entries = _named(words, flags) if words else _chosen(flags)
    whole = "--all" in flags
    plans = [plan_reclaim(entry, whole=whole) for entry in entries]
    plans = [plan for plan in plans if not plan.is_nothing]
    if not plans:
        print("nothing to free")
        return EXIT_FINISHED
    _show(plans)
    if "--dry-run" in flags:
        return EXIT_FINISHED
    if "--yes" not in flags and not _is_wanted(plans, whole=whole):
        print("nothing was removed")
        return EXIT_INTERRUPTED
    return _remove(plans)


def _named(words: list[str], flags: dict[str, str]) -> list[RunEntry]:
    """Each once, by whatever name."""
    extra = [flag for flag in (*_SELECTIONS, "--in") if flag in flags]
    if extra:
        raise UserError("name runs, or say which", got=f"{' '.join(words)} with {extra[0]}", hint="leave one out")
    entries = [read_entry(find_run(word).path) for word in words]
    return list({entry.path.resolve(): entry for entry in entries}.values())


def _chosen(flags: dict[str, str]) -> list[RunEntry]:
    if not any(flag in flags for flag in _SELECTIONS):
        raise UserError(
            "say which runs", allowed=f"RUN..., or {', '.join(_SELECTIONS)}", hint="paceline clean --older-than 7d"
        )
    if "--failed" in flags and "--status" in flags:
        raise UserError("--failed is --status failed,lost", hint="leave one of them out")
    older_s = _seconds(flags["--older-than"]) if "--older-than" in flags else 0.0
    if "--failed" in flags:
        flags = {**flags, "--status": "failed,lost"}
    now = time.time()
    entries = choose(list_runs(read_root(flags)), [], flags)
    kept = [entry for entry in entries if _KEEP in entry.notes.tags and flags.get("--tag") != _KEEP]
    if kept:
        print(f"left alone: {len(kept)} with the tag {_KEEP}")
    return [e for e in entries if e not in kept and e.state not in LIVING and now - e.updated >= older_s]


def _seconds(text: str) -> float:
    match = _AGE.fullmatch(text)
    if match is None:
        raise UserError(f"--older-than: {text!r} is not valid", allowed="30m, 12h, 7d or 2w")
    return int(match[1]) * _UNIT_S[match[2]]


def _show(plans: list[Reclaim]) -> None:
    widest = max(len(str(plan.entry.path)) for plan in plans)
    for plan in plans:
        count = len(plan.folders)
        what = "the whole run" if plan.is_whole else f"{count} checkpoint" + ("s" if count > 1 else "")
        stays = "" if plan.is_whole else f"; {plan.kept} stays" if " and " not in plan.kept else f"; {plan.kept} stay"
        print(f"{plan.entry.path!s:<{widest}}  {plan.entry.state:<9}  {in_bytes(plan.size_bytes):>9}  {what}{stays}")
    print(f"{len(plans)} run{'s' if len(plans) > 1 else ''}, {in_bytes(sum(plan.size_bytes for plan in plans))}")


def _is_wanted(plans: list[Reclaim], *, whole: bool) -> bool:
    if not sys.stdin.isatty():
        raise UserError("nobody can be asked: this is not a terminal", hint="--yes, or --dry-run to look only")
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
        except UserError as error:  # somebody has just started it: the others can go all the same
            print(f"left alone: {plan.entry.path}: {error.what}")
    print(f"{in_bytes(freed)} freed")
    return EXIT_FINISHED


def in_bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
