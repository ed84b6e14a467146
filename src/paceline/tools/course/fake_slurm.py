"""Simulated Slurm commands for a machine without Slurm: srun, scontrol show hostnames, hostname.

Tasks are processes of this machine with the variables of two nodes. There is no queue and no limit. The check says that
it used simulated commands.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from paceline.runs.machine import end_group

_TIMEOUT_S = 110
_WITH_VALUE = {
    *("-n", "-N", "-c", "-t", "-p", "-w", "-o", "-e", "-J"),
    *("--ntasks", "--nodes", "--ntasks-per-node", "--cpus-per-task", "--export", "--output"),
}


def run_script(script: Path, folder: Path, nodes: int, tasks_per_node: int, **variables: str) -> str:
    """Run the script with the simulated commands first in PATH; returns its output."""
    tools = folder / "bin"
    tools.mkdir()
    for name in ("srun", "scontrol", "hostname"):
        tool = tools / name
        tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m paceline.tools.course.fake_slurm {name} "$@"\n')
        tool.chmod(0o755)
    batch = {
        "SLURM_JOB_ID": "4242",
        "SLURM_JOB_NODELIST": f"node[1-{nodes}]",
        "SLURM_NNODES": str(nodes),
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NTASKS": str(nodes * tasks_per_node),
        "SLURM_NTASKS_PER_NODE": str(tasks_per_node),
        # The batch script itself runs as task 0 of the first node.
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURMD_NODENAME": "node1",
    }
    environment = {**os.environ, **batch, **variables, "PATH": f"{tools}{os.pathsep}{os.environ.get('PATH', '')}"}
    with subprocess.Popen(
        ["bash", str(script)],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            end_group(process, ask=signal.SIGKILL, grace_s=0.0)
            output, _ = process.communicate()
    return output


def _srun(arguments: list[str]) -> int:
    """Start the command once per task; neighbouring tasks share a node."""
    words = list(arguments)
    options: dict[str, str] = {}
    while words and words[0].startswith("-"):
        name, has_value, value = words.pop(0).partition("=")
        options[name] = words.pop(0) if name in _WITH_VALUE and not has_value and words else value
    nodes = int(options.get("--nodes") or options.get("-N") or os.environ["SLURM_NNODES"])
    tasks = int(options.get("--ntasks") or options.get("-n") or os.environ["SLURM_NTASKS"])
    per_node = -(-tasks // nodes)
    processes = []
    for task in range(tasks):
        place = {
            "SLURM_PROCID": str(task),
            "SLURM_LOCALID": str(task % per_node),
            "SLURM_NODEID": str(task // per_node),
            "SLURMD_NODENAME": f"node{task // per_node + 1}",
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": str(tasks),
        }
        processes.append(subprocess.Popen(words, env={**os.environ, **place}))
    return max([abs(process.wait()) for process in processes], default=0)


def _scontrol(arguments: list[str]) -> int:
    listed = re.fullmatch(r"node\[1-(\d+)\]", (arguments[2:] or [os.environ["SLURM_JOB_NODELIST"]])[0])
    if arguments[:2] != ["show", "hostnames"] or listed is None:
        print("this simulated scontrol supports only: scontrol show hostnames [LIST]", file=sys.stderr)
        return 1
    print("\n".join(f"node{number}" for number in range(1, int(listed[1]) + 1)))
    return 0


def main(arguments: list[str]) -> int:
    if arguments[0] == "srun":
        return _srun(arguments[1:])
    if arguments[0] == "scontrol":
        return _scontrol(arguments[1:])
    print(os.environ.get("SLURMD_NODENAME", "node1"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
