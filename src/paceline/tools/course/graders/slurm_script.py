"""Lesson 10: a job script for two nodes, run by the cluster that is there, or rehearsed without one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from paceline.tools.course.fake_slurm import run_script
from paceline.tools.course.lessons import find_lesson
from paceline.tools.course.verdict import Failed, Item

_NODES = 2
_TASKS_PER_NODE = 2
_TASKS = _NODES * _TASKS_PER_NODE
_CLIENT_TIMEOUT_S = 10
_JOB_TIMEOUT_S = 110
_POLL_S = 0.5


def _directives(path: Path) -> dict[str, str]:
    """The #SBATCH lines as names and values; later ones win."""
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        match = re.match(r"#SBATCH\s+(--?[\w-]+)(?:[=\s]\s*(\S+))?", line)
        if match:
            found[match[1]] = match[2] or ""
    return found


def _commands(path: Path) -> list[str]:
    """The script without comments, continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", path.read_text(encoding="utf-8"))
    return [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def check_request(path: Path) -> None:
    asked = _directives(path)
    nodes = asked.get("--nodes") or asked.get("-N") or "1"
    tasks = asked.get("--ntasks") or asked.get("-n") or ""
    per_node = asked.get("--ntasks-per-node") or (str(int(tasks) // int(nodes)) if tasks and nodes.isdecimal() else "1")
    what = f"the script asks for {nodes} node(s) with {per_node} task(s) each"
    if nodes != str(_NODES):
        raise Failed("wrong-nodes", what, "#SBATCH --nodes=2: a job on one node never tests the way between two.")
    if per_node != str(_TASKS_PER_NODE):
        raise Failed(
            "too-few-tasks",
            what,
            "One task per rank: #SBATCH --ntasks-per-node=2. Slurm starts as many as you ask for, and no more.",
        )
    if not (asked.get("--time") or asked.get("-t")):
        raise Failed(
            "no-time-limit",
            "the script does not say how long the job may run",
            "#SBATCH --time=00:05:00. Without it you get the site's default, and a short job that says so is started "
            "earlier: it fits into gaps.",
        )


def check_details(path: Path) -> None:
    commands = _commands(path)
    ports = [command for command in commands if "MASTER_PORT=" in command]
    if not ports:
        raise Failed("no-port", "MASTER_PORT is set nowhere", "export MASTER_PORT=...")
    if all(re.search(r"MASTER_PORT=[\"']?\d+", command) for command in ports):
        raise Failed(
            "fixed-port",
            ports[0],
            "Two jobs whose rank 0 share a node would meet at one port, and one of them fails - or worse, they join. "
            "Make it from the job's number: $((20000 + SLURM_JOB_ID % 10000)).",
        )
    starts = [command for command in commands if re.search(r"\bsrun\b", command)]
    if not starts:
        raise Failed(
            "no-srun",
            "there is no srun in the script",
            "The script itself runs once, on the first node. srun starts a command once per task, on all of them.",
        )
    if not any(re.search(r"\s(-K\S*|--kill-on-bad-exit\S*)", command) for command in starts):
        raise Failed(
            "survivors-hang",
            starts[0],
            "When one task dies, the others wait for it in a collective until the time limit. "
            "srun --kill-on-bad-exit=1 ends them within a second.",
        )


def check_meeting(path: Path) -> str:
    trouble = why_no_slurm()
    # On a cluster the folder must be one that all nodes see: beside the person's file, not in /tmp.
    with tempfile.TemporaryDirectory(prefix=".check-10-", dir=None if trouble else path.resolve().parent) as place:
        folder = Path(place)
        notes = folder / "notes"
        notes.mkdir()
        program = folder / "program"
        task = find_lesson("10").folder / "task.py"
        mode = " rehearsal" if trouble else ""
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{task}" "{notes}"{mode}\n')
        program.chmod(0o755)
        if trouble:
            said = run_script(path.resolve(), folder, _NODES, _TASKS_PER_NODE, PROGRAM=str(program))
        else:
            said = _submit(path.resolve(), folder, program)
        found = [json.loads(note.read_text()) for note in notes.glob("note-*.json")]
        sums = sorted(part.read_text() for part in notes.glob("sum-*"))
    _check_notes(found, said)
    if sums != ["6.0"] * _TASKS:
        what = f"the tasks' sums of 0 + 1 + 2 + 3 are {sums}\n{said[-600:]}".rstrip()
        raise Failed("did-not-meet", what, "The tasks know where to meet and did not: see what they said.")
    if trouble:
        return f"checked without Slurm: its commands were stand-ins of ours ({trouble})"
    return "checked by a real Slurm cluster"


def _check_notes(notes: list[dict[str, str]], said: str) -> None:
    ranks = sorted(note["rank"] for note in notes)
    if len(notes) != _TASKS:
        raise Failed(
            "tasks-missing",
            f"{len(notes)} of {_TASKS} tasks started $PROGRAM\n{said[-600:]}".rstrip(),
            'srun must start "$PROGRAM" once for each of the four tasks.',
        )
    if len(set(ranks)) == 1:
        raise Failed(
            "rank-outside-srun",
            f"all four tasks have RANK={ranks[0] or '(nothing)'}",
            "SLURM_PROCID is different in each task, but it was read once, in the batch script: before srun, or inside "
            "double quotes, which the script's own shell fills in. srun bash -c '...' with single quotes.",
        )
    if ranks != [str(rank) for rank in range(_TASKS)]:
        raise Failed("wrong-ranks", f"the tasks' ranks are {ranks}", "RANK=$SLURM_PROCID, in each task.")
    if {note["world_size"] for note in notes} != {str(_TASKS)}:
        raise Failed(
            "wrong-world-size", f"WORLD_SIZE is {notes[0]['world_size'] or 'not set'}, not 4", "$SLURM_NTASKS knows it."
        )
    local = [note["local_rank"] for note in sorted(notes, key=lambda note: note["rank"])]
    if local != ["0", "1", "0", "1"]:
        raise Failed("rank-is-not-local-rank", f"LOCAL_RANK is {local}, not 0, 1, 0, 1", "$SLURM_LOCALID knows it.")
    addresses = sorted({note["master_addr"] for note in notes})
    if len(addresses) > 1:
        raise Failed(
            "each-node-its-own-master",
            f"the tasks look for rank 0 on {' and '.join(addresses)}",
            "`hostname` inside a task is the task's own node. The address is the first node of the job, and all must "
            'agree on it: scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1, in the batch script.',
        )
    if addresses in ([""], ["localhost"], ["127.0.0.1"]):
        raise Failed(
            "no-master",
            f"MASTER_ADDR is {addresses[0] or 'not set'}",
            "On two nodes that is two different places. Name the first node of the job.",
        )


# --- The cluster that is there ----------------------------------------------------------------------------------------


def why_no_slurm() -> str | None:
    """What is missing for a real check, in words, or None."""
    if not os.environ.get("SLURM_CONF"):
        return "SLURM_CONF is not set; `make slurm-up` starts a cluster of two nodes"
    if shutil.which("sbatch") is None:
        return "there is no sbatch here"
    answer = _client("sinfo", "--noheader")
    return None if answer.returncode == 0 else "the cluster of SLURM_CONF does not answer"


def _client(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words,
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            timeout=_CLIENT_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(words, 1, "", f"{words[0]} did not answer")


def _submit(script: Path, folder: Path, program: Path) -> str:
    log = folder / "job.log"
    placed = (f"--output={log}", f"--chdir={folder}")
    answer = _client("sbatch", "--parsable", "--no-requeue", *placed, str(script), PROGRAM=str(program))
    if answer.returncode != 0:
        raise Failed("refused", f"sbatch: {answer.stderr.strip()[-400:]}", "Slurm does not take the script like this.")
    job = answer.stdout.strip().partition(";")[0]
    deadline = time.monotonic() + _JOB_TIMEOUT_S
    while time.monotonic() < deadline:
        listed = _client("squeue", "--noheader", "--jobs", job, "--format=%T")
        if listed.returncode != 0 or not listed.stdout.strip() or listed.stdout.strip() in ("COMPLETED", "FAILED"):
            break
        time.sleep(_POLL_S)
    else:
        _client("scancel", job)
        raise Failed(
            "never-ended",
            f"job {job} was {listed.stdout.strip().lower()} for {_JOB_TIMEOUT_S} s",
            "`squeue` says why a job waits; a job that runs this long waits for a task that never comes.",
        )
    return log.read_text() if log.exists() else ""


ITEMS = (
    Item("asks for two nodes, two tasks on each, and a time", check_request),
    Item("a port of its own, and an end for all when one fails", check_details),
    Item("four tasks start, know who they are, and meet", check_meeting),
)
