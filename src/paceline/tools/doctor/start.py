"""Starts the ranks of part two, here or on the nodes of a Slurm job, and gathers their reports. Imports no torch.

On Slurm the reports are sent through srun's output. The nodes need to share only the installation.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UserError
from paceline.integrations.slurm.facts import ask_slurm
from paceline.integrations.slurm.fit import require_possible
from paceline.integrations.slurm.request import as_srun_reads
from paceline.launch.attempt import RankMain
from paceline.launch.single_attempt import run_single_attempt
from paceline.runs.interpreter import python_command
from paceline.runtime.detect import threads_per_rank
from paceline.runtime.resources import usable_cores
from paceline.runtime.slurm import expand_hosts
from paceline.tools.doctor.examine import NodeReport
from paceline.tools.doctor.peers import leave_token, token_variables
from paceline.tools.doctor.rank_report import TO, Examination, Expected, assemble, read_folder, read_lines

_MOST_CPU_RANKS = 4
_SRUN_S = 58.0  # longer than the time limit of a rank
_QUEUE_S = 30.0  # for a new allocation to start
_MISSING = "paceline-doctor-missing: "
# Run on each node: srun's own message about a missing Python gives no reason.
_ON_NODE = (
    'said=$("$0" -c "import paceline" 2>&1) || '
    f'{{ echo "{_MISSING}${{SLURMD_NODENAME:-$(hostname)}} ${{said##*: }}"; exit 2; }}; exec "$0" "$@"'
)


class Stopped(Exception):
    """A signal stopped the doctor; the message is already printed."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def default_processes(gpus: int, device: str) -> int:
    """The same choice as `paceline train`."""
    return gpus if gpus and device != "cpu" else min(usable_cores(), _MOST_CPU_RANKS)


def run_local(
    rank_main: RankMain, arguments: list[str], processes: int, node: NodeReport, host: str, limit_s: float
) -> Examination:
    """Start ranks on this machine, with the launcher of training."""
    from paceline.settings.schema import ParallelConfig

    with tempfile.TemporaryDirectory(prefix="paceline-doctor-") as scratch:
        os.environ[TO] = scratch
        threads = threads_per_rank(ParallelConfig(), processes)
        outcome = run_single_attempt(rank_main, arguments, processes=processes, threads=threads, limit_s=limit_s)
        reports = read_folder(Path(scratch))
    if outcome.stopped_by is not None:
        outcome.print_error()
        raise Stopped(outcome.exit_code)
    trouble = outcome.failure.what if outcome.failure is not None else ""
    if outcome.is_late:
        trouble = f"the ranks were not done after {limit_s:.0f} s"
    return assemble(reports, Expected(processes, "paceline", (host,), trouble), node, host)


@dataclass(frozen=True)
class SlurmStart:
    nodes: int  # 0: those of the current allocation
    processes: int  # per node
    arguments: list[str]
    options: Sequence[str]  # for srun, as given
    output_dir: Path = Path("runs")


def run_slurm(start: SlurmStart) -> Examination:
    """Run one srun in the current allocation, or in a new one."""
    command = srun_command(start)
    python = command.index(sys.executable)
    nodes = start.nodes or int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
    known = expand_hosts(os.environ.get("SLURM_JOB_NODELIST", "")) if not start.nodes else ()
    token = leave_token(start.output_dir)
    surroundings = {**os.environ, TO: "output", **token_variables(token)}
    try:
        code, out, err = _run_srun([*command[:python], "bash", "-c", _ON_NODE, *command[python:]], surroundings)
    finally:
        if token is not None:
            token.remove()
    reports, rest = read_lines(out.splitlines())
    missing = dict(line.partition(_MISSING)[2].partition(" ")[::2] for line in rest if _MISSING in line)
    trouble = "" if code == 0 else _first_line(err) or (rest[-1] if rest else f"exit {code}")
    if not reports and not missing:
        raise UserError(
            "srun returned no reports",
            where=shlex.join(command[:python]),
            got=trouble or "no output",
            hint="fewer --processes if a node has too few CPUs; add options of your site after --, for example\n"
            "paceline doctor --launch slurm --nodes 2 -- --partition=NAME",
        )
    hosts = known or tuple(dict.fromkeys(host for report in reports for host in report.hosts or [report.host]))
    return assemble(reports, Expected(nodes * start.processes, "srun", hosts or tuple(missing), trouble, missing))


def _run_srun(command: list[str], surroundings: dict[str, str]) -> tuple[int, str, str]:
    """Exit code, output and errors."""
    limit_s = _SRUN_S + (0.0 if _is_in_allocation() else _QUEUE_S)
    with subprocess.Popen(
        command, env=surroundings, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as srun:
        try:
            out, err = srun.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            srun.terminate()  # srun ends its tasks and returns their output
            out, err = srun.communicate()
            err += f"\nsrun was ended after {limit_s:.0f} s"
        except BaseException:
            srun.terminate()
            raise
    return srun.returncode, out, err


def srun_command(start: SlurmStart) -> list[str]:
    if shutil.which("srun") is None:
        raise UserError(
            "there is no srun on this machine", where="PATH", hint="log in to the cluster; or --launch local"
        )
    if not start.nodes and not _is_in_allocation():
        raise UserError(
            "this shell is not in a Slurm allocation",
            where="flag --launch slurm",
            hint="--nodes N requests one; or run salloc --nodes N first",
        )
    nodes = [f"--nodes={start.nodes}"] if start.nodes else []
    return [
        *("srun", *nodes, f"--ntasks-per-node={start.processes}", "--kill-on-bad-exit=0", "--job-name=paceline-doctor"),
        *start.options,
        *python_command("-m", "paceline", "doctor", *start.arguments),
    ]


def refuse_impossible(start: SlurmStart) -> None:
    """Do not wait for an allocation that this cluster can never give. Inside an allocation, srun judges the step."""
    if start.nodes and not _is_in_allocation():
        request = as_srun_reads(start.nodes, start.processes, start.options, os.environ)
        where = {"nodes": "flag --nodes", "cpus_per_task": "flag --processes"}
        require_possible(request, ask_slurm(), where)


def _is_in_allocation() -> bool:
    return "SLURM_JOB_ID" in os.environ


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[0].removeprefix("error: ")[:300] if lines else ""
