"""Lesson 10: a job script for two nodes, run on a Slurm cluster, or with simulated commands if there is none."""

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
from paceline.tools.course.verdict import Failed, Item, cause_not_known

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
    per_node = asked.get("--ntasks-per-node") or (
        str(int(tasks) // int(nodes)) if tasks.isdecimal() and nodes.isdecimal() and int(nodes) else "1"
    )
    what = f"the script asks for {nodes} node(s) with {per_node} task(s) each"
    if nodes != str(_NODES):
        raise Failed("wrong-nodes", what, "#SBATCH --nodes=2: the exercise is a job on two nodes.")
    if per_node != str(_TASKS_PER_NODE):
        raise Failed(
            "wrong-tasks",
            what,
            "One task per rank, and two ranks on each node: #SBATCH --ntasks-per-node=2.",
        )
    if not (asked.get("--time") or asked.get("-t")):
        raise Failed(
            "no-time-limit",
            "the script does not say how long the job may run",
            "#SBATCH --time=00:05:00. Without it you get the site's default. A job with a short limit starts earlier, "
            "because it fits into gaps.",
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
            "Two jobs may share a node. With the same port one of them fails, or they connect to each other. Compute "
            "it from the job's number: $((20000 + SLURM_JOB_ID % 10000)).",
        )
    starts = [command for command in commands if re.search(r"\bsrun\b", command)]
    if not starts:
        raise Failed(
            "no-srun",
            "there is no srun in the script",
            "The script itself runs once, on the first node. srun starts a command once per task, on all nodes.",
        )
    if not any(re.search(r"\s(-K\S*|--kill-on-bad-exit\S*)", command) for command in starts):
        raise Failed(
            "survivors-hang",
            starts[0],
            "When one task dies, the others wait for it in a collective until the time limit. "
            "srun --kill-on-bad-exit=1 ends them within a second.",
        )


def check_connection(path: Path) -> str:
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
        raise cause_not_known(
            what, "four tasks that connect at MASTER_ADDR and MASTER_PORT, and add up to 6.0 on each."
        )
    if trouble:
        return f"checked without Slurm, with simulated commands ({trouble})"
    return "checked by a real Slurm cluster"


def _check_notes(notes: list[dict[str, str]], said: str) -> None:
    ranks = sorted(note["rank"] for note in notes)
    if len(notes) != _TASKS:
        raise Failed(
            "tasks-missing",
            f"{len(notes)} of {_TASKS} tasks started $PROGRAM\n{said[-600:]}".rstrip(),
            'srun must start "$PROGRAM" once for each of the four tasks.',
        )
    if set(ranks) == {""}:
        raise Failed("rank-not-set", "RANK is not set in the tasks", "RANK=$SLURM_PROCID before exec, in each task.")
    if len(set(ranks)) == 1:
        raise Failed(
            "rank-outside-srun",
            f"all four tasks have RANK={ranks[0]}",
            "SLURM_PROCID is different in each task, but it was read once, in the batch script: before srun, or inside "
            "double quotes, which the shell of the script replaces. Use srun bash -c '...' with single quotes.",
        )
    if ranks != [str(rank) for rank in range(_TASKS)]:
        if sorted(ranks) == ["0", "0", "1", "1"]:
            raise Failed(
                "local-rank-as-rank", f"the tasks' ranks are {ranks}", "RANK=$SLURM_PROCID, not SLURM_LOCALID."
            )
        raise cause_not_known(f"the tasks' ranks are {ranks}", "0, 1, 2, 3: RANK=$SLURM_PROCID in each task.")
    if {note["world_size"] for note in notes} != {str(_TASKS)}:
        what = f"WORLD_SIZE is {notes[0]['world_size'] or 'not set'}, not 4"
        raise Failed("wrong-world-size", what, "It is the number of all tasks, on both nodes: $SLURM_NTASKS.")
    local = [note["local_rank"] for note in sorted(notes, key=lambda note: note["rank"])]
    if local != ["0", "1", "0", "1"]:
        what = f"LOCAL_RANK of the ranks 0 to 3 is {local}, not 0, 1, 0, 1"
        if local == ["0", "1", "2", "3"]:
            raise Failed("rank-is-not-local-rank", what, "The number of a task on its node is $SLURM_LOCALID.")
        if local == [""] * _TASKS:
            raise Failed("local-rank-not-set", what, "LOCAL_RANK=$SLURM_LOCALID before exec, in each task.")
        raise cause_not_known(what, "LOCAL_RANK=$SLURM_LOCALID in each task.")
    addresses = sorted({note["master_addr"] for note in notes})
    if len(addresses) > 1:
        raise Failed(
            "each-node-its-own-master",
            f"the tasks try to connect to {' and '.join(addresses)}",
            "`hostname` inside a task is the task's own node. All tasks must use the first node of the job: "
            'scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1, in the batch script.',
        )
    if addresses in ([""], ["localhost"], ["127.0.0.1"]):
        raise Failed(
            "no-master",
            f"MASTER_ADDR is {addresses[0] or 'not set'}",
            "On two nodes each task would connect to its own node. Use the name of the first node of the job.",
        )


# --- A real cluster ---------------------------------------------------------------------------------------------------


def why_no_slurm() -> str | None:
    """Why there is no cluster to use, or None."""
    if not os.environ.get("SLURM_CONF"):
        return "SLURM_CONF is not set; `make slurm-up` starts a cluster of two nodes"
    if shutil.which("sbatch") is None:
        return "sbatch is not installed"
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
        raise Failed(
            "refused", f"sbatch: {answer.stderr.strip()[-400:]}", "Slurm refuses the script; its message says why."
        )
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
            "`squeue` says why a job is pending. A job that runs this long may wait for a rank that never connects.",
        )
    return log.read_text() if log.exists() else ""


ITEMS = (
    Item("requests two nodes, two tasks on each, and a time limit", check_request),
    Item("a port from the job's number, and all tasks end if one fails", check_details),
    Item("four tasks start, know their ranks, and connect", check_connection),
)
