"""`paceline doctor`: check whether this machine, or this allocation, is fit to train."""

from __future__ import annotations

import json
import os
import shlex
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from paceline.cli.command import Command
from paceline.errors import EXIT_FINISHED, EXIT_INTERNAL, UserError
from paceline.runs.folder import write_atomically
from paceline.runtime.detect import ALONE, RankEnvironment, read_rank_environment
from paceline.runtime.pulse import open_pulse
from paceline.settings.command_line import arguments_of
from paceline.settings.declare import Arg, Range
from paceline.settings.syntax import parse_processes
from paceline.tools.doctor.examine import examine_node
from paceline.tools.doctor.findings import EXIT_FAILED, DoctorFinding, is_healthy, nodes_to_exclude, skipped, verdict
from paceline.tools.doctor.rank_report import (
    Examination,
    Expected,
    RankReport,
    Screen,
    assemble,
    has_listener,
    send_report,
    to_json,
    write_markdown,
)
from paceline.tools.doctor.request import Device, DoctorRequest, InjectedFaults, Launch, NodeRole, parse_faults
from paceline.tools.doctor.start import (
    SlurmStart,
    Stopped,
    default_processes,
    refuse_impossible,
    run_local,
    run_slurm,
    srun_command,
)

if TYPE_CHECKING:
    from paceline.tools.doctor.session import Session

_MOST_NODES = 10_000
_ALLOWED_S = 120.0  # for a rank; the session's own deadline is shorter
_WHOLE_S, _LEAST_S = 57.0, 30.0  # for everything; at least for the ranks
# If one of these fails, no ranks are started.
_STOPPERS = ("packages", "torch", "devices", "temporary folder", "shared memory", "host name")


@dataclass(frozen=True)
class Doctor:
    """Check whether this machine, or this allocation, is fit to train.

    First every node by itself: software, devices, shared memory, limits, disks, clock, names, ports. Then ranks
    together: connections, sums, slow or wrong ranks, and thirty steps of training whose result is known. Each check
    passes, warns or fails, and says what to do.

    Exit code 0: healthy, perhaps with warnings. 1: a check failed. 2: a flag is wrong.
    """

    launch: Launch | None = None
    """local: start ranks (default). torchrun: be one of torchrun's ranks. slurm: srun over this allocation, or over a
    new one of --nodes N."""
    processes: Annotated[str, Arg("N")] = "0"
    """Ranks of each node; 0: one per GPU, else one per core, at most 4 (slurm: 1)."""
    device: Device = "auto"
    """The device of the ranks."""
    output_dir: Path = DoctorRequest.output_dir
    """The folder where runs will be written."""
    data_dir: Path = DoctorRequest.data_dir
    """The folder of the data sets."""
    nodes: Annotated[int | None, Range(low=1, high=_MOST_NODES)] = None
    """slurm: request an allocation of N nodes."""
    exclude_to: Annotated[Path | None, Arg("FILE")] = None
    """Write the nodes that failed, for srun --exclude=$(cat FILE) (slurm: exclude.txt unless given)."""
    report: Annotated[Path | None, Arg("FILE")] = None
    """Write a report for a ticket, in Markdown, without secrets."""
    json: bool = False
    """Print JSON."""
    inject: Annotated[str, Arg("FAULT")] = ""
    """Faults to inject inside the doctor, for example "slow rank=1" (list in docs/guides/doctor.md)."""
    srun_options: Annotated[tuple[str, ...], Arg("OPTIONS OF SRUN", place="rest")] = ()


@dataclass(frozen=True)
class Asked:
    """The command line, checked."""

    settings: Doctor
    request: DoctorRequest
    exclude_to: Path | None
    for_ranks: list[str]  # the flags that a rank needs too


def doctor(settings: Doctor) -> int:
    started = time.monotonic()
    asked = _read(settings)
    environment = read_rank_environment()
    if environment is None and has_listener():
        environment = ALONE  # a single task of our own srun
    if environment is not None:
        return _be_a_rank(asked, environment, started)
    if settings.launch == "torchrun":
        raise UserError(
            "this process is not a rank of torchrun",
            where="flag --launch torchrun",
            hint="torchrun --nproc-per-node 2 -m paceline doctor --launch torchrun",
        )
    if settings.launch == "slurm":
        request = asked.request
        start = SlurmStart(
            settings.nodes or 0, request.processes or 1, asked.for_ranks, settings.srun_options, request.output_dir
        )
        command = srun_command(start)
        refuse_impossible(start)
        if not settings.json:
            print(f"paceline doctor: {shlex.join(command)}", flush=True)
        return _deliver(run_slurm(start), asked, started)
    try:
        return _examine_here(asked, started)
    except Stopped as stopped:
        return stopped.code


def _read(settings: Doctor) -> Asked:
    """The settings, checked together."""
    if (settings.srun_options or settings.nodes is not None) and settings.launch != "slurm":
        what = "--nodes" if settings.nodes is not None else "options behind --"
        raise UserError(f"{what} needs --launch slurm", where="the command line", hint="--launch slurm --nodes 2")
    processes = parse_processes(settings.processes)
    if processes.low != processes.high and not processes.is_open:
        raise UserError("one number of ranks is needed", where="flag --processes", got=settings.processes)
    for flag, path in (("--report", settings.report), ("--exclude-to", settings.exclude_to)):
        if path is not None and not path.absolute().parent.is_dir():
            raise UserError("there is no such folder", where=f"flag {flag}", got=str(path.parent))
        if path is not None and path.is_dir():
            raise UserError("a file is needed, not a folder", where=f"flag {flag}", got=str(path))
    request = DoctorRequest(
        processes=0 if processes.is_open else processes.high,
        device=settings.device,
        output_dir=settings.output_dir,
        data_dir=settings.data_dir,
        faults=parse_faults(settings.inject),
    )
    exclude_to = settings.exclude_to or (Path("exclude.txt") if settings.launch == "slurm" else None)
    for_ranks = arguments_of(settings, without=("nodes", "report", "exclude_to", "json"))
    return Asked(settings, request, exclude_to, for_ranks)


# --- On this machine --------------------------------------------------------------------------------------------------


def _examine_here(asked: Asked, started: float) -> int:
    """Part one in this process, part two in ranks that it starts."""
    from paceline.cli.main import rank_main

    host = socket.gethostname()
    screen = None if asked.settings.json else Screen()
    if screen is not None:
        screen.say(f"paceline doctor: {host}, first by itself")
        if os.environ.get("SLURM_JOB_NUM_NODES", "1") != "1":
            screen.say("note: this job has several nodes; --launch slurm looks at all of them", "warn")
    around = _surroundings(asked.request)
    node = examine_node(asked.request, around, InjectedFaults(asked.request.faults))
    processes = asked.request.processes or default_processes(node.gpus, asked.request.device)
    alone = assemble([], Expected(0, "paceline", (host,)), node, host)
    obstacles = [one.name for one in node.findings if one.status == "fail" and one.name in _STOPPERS]
    if screen is not None:
        screen.show(alone.findings)
        if not obstacles:
            screen.say(f"\nnow {processes} rank{'s' if processes > 1 else ''} together")
    if obstacles:
        alone.findings.append(DoctorFinding(**{**vars(_not_tried(obstacles)), "group": "RANKS"}))
        whole = alone
    else:
        arguments = ["doctor", *asked.for_ranks, f"--processes={processes}"]
        left_s = max(_LEAST_S, _WHOLE_S - (time.monotonic() - started))
        whole = run_local(rank_main, arguments, processes, node, host, left_s)
    whole.world_size = processes
    shown = len(node.findings)
    return _deliver(whole, asked, started, already_shown=shown)


def _not_tried(obstacles: list[str]) -> DoctorFinding:
    return skipped("ranks", f"not tried: first of all {', '.join(obstacles)}")


def _surroundings(request: DoctorRequest) -> NodeRole:
    """MASTER_ADDR and MASTER_PORT may be set without a launcher, for a job that is about to start."""
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    is_given = bool(host) or port.isdecimal()
    return NodeRole(
        local_ranks=request.processes or default_processes(0, request.device),
        rendezvous_at=(host, int(port) if port.isdecimal() else 0) if is_given else None,
        serves=port.isdecimal(),
    )


def _deliver(examination: Examination, asked: Asked, started: float, *, already_shown: int = 0) -> int:
    """Screen or JSON, files, exit code."""
    examination.seconds = time.monotonic() - started
    findings = examination.findings
    healthy = is_healthy(findings)
    exclude = nodes_to_exclude(findings, examination.hosts)
    if asked.exclude_to:
        write_atomically(asked.exclude_to, ",".join(exclude) + "\n" if exclude else "")
    if asked.settings.report:
        write_atomically(asked.settings.report, write_markdown(examination))
    if asked.settings.json:
        print(json.dumps(to_json(examination), indent=2, default=str))
        return EXIT_FINISHED if healthy else EXIT_FAILED
    screen = Screen()
    if not already_shown:
        ranks = f"{examination.world_size} rank{'s' if examination.world_size > 1 else ''}"
        screen.say(f"{ranks} by {examination.launcher} on {', '.join(examination.hosts)}")
    screen.show(findings[already_shown:])
    print()
    for kind, count in examination.fault_counts.items():
        print(f"injected: {kind}, took effect {count} times")
    if asked.exclude_to and exclude:
        print(f"to leave out: {','.join(exclude)} (srun --exclude=$(cat {asked.exclude_to}))")
    if asked.settings.report:
        print(f"report in {asked.settings.report}")
    screen.say(verdict(findings, examination.seconds), "pass" if healthy else "fail")
    return EXIT_FINISHED if healthy else EXIT_FAILED


# --- As one of several ranks ------------------------------------------------------------------------------------------


def _be_a_rank(asked: Asked, environment: RankEnvironment, started: float) -> int:
    if asked.settings.launch == "local" and not environment.is_supervised:
        raise UserError(
            f"this process is a rank of {environment.launcher} already",
            where="flag --launch local",
            hint="leave --launch out to join; or unset RANK and WORLD_SIZE",
        )
    from paceline.tools.doctor.session import Session

    session = Session(asked.request, environment)

    def on_late(report: RankReport) -> None:
        if has_listener():
            send_report(report)
        elif environment.rank == 0:
            _report_together(session, asked, environment, started)

    with open_pulse(environment.rank, is_supervised=environment.is_supervised, allowed_s=_ALLOWED_S):
        session.run(on_late)
        if has_listener():
            send_report(session.report)
            code = EXIT_FINISHED if session.is_clean else EXIT_INTERNAL
        else:
            code = _report_together(session, asked, environment, started)
        session.close()
    return code


def _report_together(session: Session, asked: Asked, environment: RankEnvironment, started: float) -> int:
    """Without our launcher, rank 0 reports what all ranks found. The others only have the same exit code."""
    reports = session.reports or [session.report]
    is_met = bool(session.reports)
    expected = Expected(environment.world_size if is_met else 0, environment.launcher)
    examination = assemble(reports, expected)
    examination.world_size = environment.world_size
    if environment.rank == 0 or (not is_met and environment.local_rank == 0):
        return _deliver(examination, asked, started)
    return EXIT_FINISHED if is_healthy(examination.findings) else EXIT_FAILED


COMMANDS = (Command("doctor", Doctor, doctor),)
