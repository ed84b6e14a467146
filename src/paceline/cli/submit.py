"""`paceline submit slurm|kubernetes RECIPE [flags]`: check everything, write the job down, hand it to a cluster."""

from __future__ import annotations

import difflib
import importlib
import shlex

from paceline.errors import EXIT_FINISHED, UserError

_USAGE = """\
usage: paceline submit slurm RECIPE [flags]
       paceline submit kubernetes RECIPE [flags]

Check a recipe and its flags, write the job into the run folder, and hand it to a cluster. --dry-run only prints it.
Flags of each:  paceline submit slurm --help    paceline submit kubernetes --help
"""
SCHEDULERS = ("slurm", "kubernetes")
_SHORT = {"k8s": "kubernetes", "kube": "kubernetes", "sbatch": "slurm"}


def run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, end="")
        return EXIT_FINISHED
    scheduler, *rest = arguments
    if scheduler not in SCHEDULERS:
        close = difflib.get_close_matches(scheduler, SCHEDULERS, n=1)
        meant = _SHORT.get(scheduler) or (close[0] if close else "")
        given = rest if meant else arguments  # without the name of a scheduler, a recipe comes first
        hint = shlex.join(["paceline", "submit", meant or SCHEDULERS[0], *given])
        raise UserError("submit to which scheduler?", got=scheduler, allowed=", ".join(SCHEDULERS), hint=hint)
    code: int = importlib.import_module(f"paceline.cli.submit_{scheduler}").run(rest)
    return code
