"""`paceline doctor`: is this machine, or this allocation, fit to train."""

from __future__ import annotations

import json
import os
import shlex
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.train import rank_main
from paceline.errors import EXIT_FINISHED, EXIT_INTERNAL, UserError
from paceline.runs.folder import write_atomically
from paceline.runtime.detect import ALONE, RankEnvironment, read_rank_environment
from paceline.runtime.pulse import open_pulse
from paceline.settings.processes import parse_processes
from paceline.tools.doctor.examine import examine_node
from paceline.tools.doctor.findings import EXIT_FAILED, DoctorFinding, is_healthy, nodes_to_exclude, skipped, verdict
from paceline.tools.doctor.plant import Planted, parse_plants
from paceline.tools.doctor.rank_report import Examination, Expected, RankReport, assemble, has_listener, send_report
from paceline.tools.doctor.report import Screen, to_json, write_markdown
from paceline.tools.doctor.request import DEVICES, LAUNCHES, DoctorRequest, NodeRole
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

_HELP = """\
usage: paceline doctor [flags] [-- OPTIONS OF SRUN]

Is this machine, or this allocation, fit to train? First every node by itself: software, devices, shared memory,
limits, disks, clock, names, ports. Then ranks together: who reaches whom, are sums right, is a rank slow or wrong,
and thirty steps of training whose outcome is known. Each check passes, warns or fails, and says what to do.

  --launch HOW        local: ranks of its own (default). torchrun: be one of torchrun's ranks.
                      slurm: srun over this allocation, or over one of --nodes N
  --processes N       ranks of each node; default: one per GPU, else one per core, at most 4 (slurm: 1)
  --device DEVICE     auto, cpu or cuda
  --output-dir PATH   where runs will be written (default: runs)
  --data-dir PATH     where data sets are (default: data)
  --nodes N           slurm: ask for an allocation of N nodes
  --exclude-to FILE   write the nodes that failed, for srun --exclude=$(cat FILE) (slurm: exclude.txt unless given)
  --report FILE       write a report for a ticket, in Markdown, without secrets
  --json              print everything for programs

Exit code 0: healthy, perhaps with warnings. 1: a check failed. 2: a flag is wrong.
"""
_VALUES = {
    "--launch": "local",
    "--processes": "2",
    "--device": "cpu",
    "--output-dir": "runs",
    "--data-dir": "data",
    "--nodes": "2",
    "--exclude-to": "exclude.txt",
    "--report": "doctor.md",
    "--plant": "'slow rank=1'",  # for tests, and in the guide
}
_MOST_NODES = 10_000
_ALLOWED_S = 120.0  # for a rank; the session's own deadline is shorter
_WHOLE_S, _LEAST_S = 57.0, 30.0  # for everything; for the ranks, however slow this machine was by itself
# Without these there is no point in starting ranks.
_STOPPERS = ("packages", "torch", "devices", "temporary folder", "shared memory", "host name")


@dataclass(frozen=True)
class Asked:
    """The command line, understood."""

    launch: str
    request: DoctorRequest
    nodes: int
    exclude_to: str
    report: str
    is_json: bool
    srun_options: tuple[str, ...]
    for_ranks: list[str]  # the flags a rank needs too


def run(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(_HELP, end="")
        return EXIT_FINISHED
    started = time.monotonic()
    asked = _read(arguments)
    environment = read_rank_environment()
    if environment is None and has_listener():
        environment = ALONE  # a single task of our own srun
    if environment is not None:
        return _be_a_rank(asked, environment, started)
    if asked.launch == "torchrun":
        raise UserError(
            "this process is no rank of torchrun",
            where="flag --launch torchrun",
            hint="torchrun --nproc-per-node 2 -m paceline doctor --launch torchrun",
        )
    if asked.launch == "slurm":
        request = asked.request
        start = SlurmStart(asked.nodes, request.processes or 1, asked.for_ranks, asked.srun_options, request.output_dir)
        command = srun_command(start)
        refuse_impossible(start)
        if not asked.is_json:
            print(f"paceline doctor: {shlex.join(command)}", flush=True)
        return _deliver(run_slurm(start), asked, started)
    try:
        return _examine_here(asked, started)
    except Stopped as stopped:
        return stopped.code


# --- The command line -------------------------------------------------------------------------------------------------


def _read(arguments: list[str]) -> Asked:
    end = arguments.index("--") if "--" in arguments else len(arguments)
    own, options = arguments[:end], tuple(arguments[end + 1 :])
    given, is_json = _split(own)
    launch = _word(given, "--launch", LAUNCHES, "")
    nodes = given.get("--nodes", "0")
    if not nodes.isdecimal() or int(nodes) > _MOST_NODES or (nodes == "0" and "--nodes" in given):
        raise UserError("nodes is not valid", where="flag --nodes", got=nodes, allowed=f"a number up to {_MOST_NODES}")
    if (options or "--nodes" in given) and launch != "slurm":
        what = "--nodes" if "--nodes" in given else "options behind --"
        raise UserError(f"{what} needs --launch slurm", where="the command line", hint="--launch slurm --nodes 2")
    processes = parse_processes(given.get("--processes", "0"))
    if processes.low != processes.high and not processes.is_open:
        raise UserError("one number of ranks is needed", where="flag --processes", got=given["--processes"])
    _check_files(given)
    plants = parse_plants(given.get("--plant", ""))
    request = DoctorRequest(
        processes=0 if processes.is_open else processes.high,
        device=_word(given, "--device", DEVICES, "auto"),
        output_dir=Path(given.get("--output-dir", DoctorRequest.output_dir)),
        data_dir=Path(given.get("--data-dir", DoctorRequest.data_dir)),
        plants=plants,
    )
    for_ranks = [
        f"{name}={value}" for name, value in given.items() if name not in ("--nodes", "--report", "--exclude-to")
    ]
    exclude_to = given.get("--exclude-to", "exclude.txt" if launch == "slurm" else "")
    return Asked(launch, request, int(nodes), exclude_to, given.get("--report", ""), is_json, options, for_ranks)


def _split(arguments: list[str]) -> tuple[dict[str, str], bool]:
    """Flags with their values, and whether --json is among them."""
    given: dict[str, str] = {}
    is_json, tokens = False, list(arguments)
    while tokens:
        token = tokens.pop(0)
        name, has_value, value = token.partition("=")
        if token == "--json":
            is_json = True
            continue
        if name not in _VALUES:
            raise _unknown(name)
        if not has_value:
            if not tokens or tokens[0].startswith("--"):
                raise UserError(f"{name} needs a value", where="the command line", hint=f"{name} {_VALUES[name]}")
            value = tokens.pop(0)
        if not value and name != "--plant":
            raise UserError(f"{name} needs a value", where="the command line", hint=f"{name} {_VALUES[name]}")
        given[name] = value
    return given, is_json


def _unknown(name: str) -> UserError:
    import difflib

    known = [*_VALUES, "--json"]
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"perhaps you meant {close[0]}" if close else "paceline doctor --help"
    return UserError(f"unknown flag {name!r}", where="the command line", allowed=", ".join(known), hint=hint)


def _word(given: dict[str, str], name: str, allowed: tuple[str, ...], default: str) -> str:
    value = given.get(name, default)
    if value != default and value not in allowed:
        raise UserError(f"{name} does not know {value!r}", where=f"flag {name}", allowed=", ".join(allowed))
    return value


def _check_files(given: dict[str, str]) -> None:
    for name in ("--report", "--exclude-to"):
        if name in given and not Path(given[name]).absolute().parent.is_dir():
            raise UserError("there is no such folder", where=f"flag {name}", got=str(Path(given[name]).parent))
        if name in given and Path(given[name]).is_dir():
            raise UserError("a file is needed, not a folder", where=f"flag {name}", got=given[name])


# --- On this machine --------------------------------------------------------------------------------------------------


def _examine_here(asked: Asked, started: float) -> int:
    """Part one in this process, part two in ranks of our own."""
    host = socket.gethostname()
    screen = None if asked.is_json else Screen()
    if screen is not None:
        screen.say(f"paceline doctor: {host}, first by itself")
        if os.environ.get("SLURM_JOB_NUM_NODES", "1") != "1":
            screen.say("note: this job has several nodes; --launch slurm looks at all of them", "warn")
    around = _surroundings(asked.request)
    node = examine_node(asked.request, around, Planted(asked.request.plants))
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
    told = len(node.findings)
    return _deliver(whole, asked, started, already_told=told)


def _not_tried(obstacles: list[str]) -> DoctorFinding:
    return skipped("ranks", f"not tried: first of all {', '.join(obstacles)}")


def _surroundings(request: DoctorRequest) -> NodeRole:
    """Told where to meet, though by no launcher: MASTER_ADDR and MASTER_PORT, for a job that is about to start."""
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    is_told = bool(host) or port.isdecimal()
    return NodeRole(
        local_ranks=request.processes or default_processes(0, request.device),
        meets_at=(host, int(port) if port.isdecimal() else 0) if is_told else None,
        serves=port.isdecimal(),
    )


def _deliver(examination: Examination, asked: Asked, started: float, *, already_told: int = 0) -> int:
    """Screen or JSON, files, exit code."""
    examination.seconds = time.monotonic() - started
    findings = examination.findings
    healthy = is_healthy(findings)
    exclude = nodes_to_exclude(findings, examination.hosts)
    if asked.exclude_to:
        write_atomically(Path(asked.exclude_to), ",".join(exclude) + "\n" if exclude else "")
    if asked.report:
        write_atomically(Path(asked.report), write_markdown(examination))
    if asked.is_json:
        print(json.dumps(to_json(examination), indent=2, default=str))
        return EXIT_FINISHED if healthy else EXIT_FAILED
    screen = Screen()
    if not already_told:
        ranks = f"{examination.world_size} rank{'s' if examination.world_size > 1 else ''}"
        screen.say(f"{ranks} by {examination.launcher} on {', '.join(examination.hosts)}")
    screen.show(findings[already_told:])
    print()
    for kind, count in examination.struck.items():
        print(f"planted: {kind}, which struck {count} times")
    if asked.exclude_to and exclude:
        print(f"to leave out: {','.join(exclude)} (srun --exclude=$(cat {asked.exclude_to}))")
    if asked.report:
        print(f"report in {asked.report}")
    screen.say(verdict(findings, examination.seconds), "pass" if healthy else "fail")
    return EXIT_FINISHED if healthy else EXIT_FAILED


# --- As one of several ranks ------------------------------------------------------------------------------------------


def _be_a_rank(asked: Asked, environment: RankEnvironment, started: float) -> int:
    if asked.launch == "local" and not environment.is_supervised:
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
            _speak(session, asked, environment, started)

    with open_pulse(environment.rank, is_supervised=environment.is_supervised, allowed_s=_ALLOWED_S):
        session.run(on_late)
        if has_listener():
            send_report(session.report)
            code = EXIT_FINISHED if session.is_clean else EXIT_INTERNAL
        else:
            code = _speak(session, asked, environment, started)
        session.close()
    return code


def _speak(session: Session, asked: Asked, environment: RankEnvironment, started: float) -> int:
    """No launcher of ours waits: rank 0 tells what all have found; the others only share its exit code."""
    reports = session.reports or [session.report]
    is_met = bool(session.reports)
    expected = Expected(environment.world_size if is_met else 0, environment.launcher)  # else its own word is all
    examination = assemble(reports, expected)
    examination.world_size = environment.world_size
    if environment.rank == 0 or (not is_met and environment.local_rank == 0):
        return _deliver(examination, asked, started)
    return EXIT_FINISHED if is_healthy(examination.findings) else EXIT_FAILED
