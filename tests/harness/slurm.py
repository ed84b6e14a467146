"""A real Slurm cluster on this machine, with power loss and network failures (tests/integrations/slurm/cluster)."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

import pytest

from harness.cli import LAUNCH_VARIABLES

SCRIPTS = Path(__file__).resolve().parents[1] / "integrations" / "slurm" / "cluster"
PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "ip", "unshare", "flock")
REQUIRE = "PACELINE_REQUIRE_SLURM"
POLL_S = 0.2
# Final job states of squeue.
FINAL_STATES = (
    *("COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"),
    *("BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY"),
)


def why_no_slurm(path: str | None = None) -> str | None:
    """What this machine lacks for a cluster, or None. `path` replaces PATH."""
    if os.geteuid() != 0:
        return "a Slurm cluster needs root (namespaces and a bridge)"
    missing = [name for name in PROGRAMS if shutil.which(name, path=path) is None]
    return f"not installed: {', '.join(missing)} (`make slurm-install` installs them)" if missing else None


def need_slurm(path: str | None = None) -> None:
    """Skip if no cluster is possible; fail instead under PACELINE_REQUIRE_SLURM=1."""
    reason = why_no_slurm(path)
    if reason is None:
        return
    if os.environ.get(REQUIRE, "") not in ("", "0"):
        pytest.fail(f"{reason}, and {REQUIRE} is set")
    pytest.skip(reason)


class Cluster:
    """Nodes n1..nN and the controller ctl, for the duration of the block.

    All nodes use this machine's file systems, except /dev/shm: any folder is "shared storage".
    """

    def __init__(
        self, nodes: int = 2, cpus: int = 4, gpus: int = 0, accounting: bool = False, extra: tuple[str, ...] = ()
    ) -> None:
        self.nodes = tuple(f"n{number}" for number in range(1, nodes + 1))
        self._shape = ["--nodes", str(nodes), "--cpus", str(cpus), "--gpus", str(gpus)]
        self._shape += ["--accounting"] if accounting else []
        for line in extra:
            self._shape += ["--extra", line]
        self.state = Path()

    def __enter__(self) -> Cluster:
        # Not pytest's folder: Slurm's sockets need short paths.
        self.state = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        try:
            self._script("up", str(self.state), *self._shape)
        except BaseException:
            self.down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def up(self) -> None:
        """Boot every node that is off."""
        self._script("up", str(self.state))

    def down(self) -> None:
        self._script("down", str(self.state))

    @property
    def conf(self) -> Path:
        return self.state / "slurm.conf"

    def environment(self, **extra: str) -> dict[str, str]:
        """The environment for Slurm's clients: this cluster, without variables of a launcher or another cluster."""
        clean = {
            name: value
            for name, value in os.environ.items()
            if name not in LAUNCH_VARIABLES and not name.startswith(("SLURM_", "SBATCH_", "SRUN_", "SALLOC_"))
        }
        return {**clean, "SLURM_CONF": str(self.conf), **extra}

    def run(
        self,
        *command: str,
        timeout_s: float = 30,
        cwd: Path | None = None,
        check: bool = True,
        text_in: str | None = None,
        extra: Mapping[str, str] | None = None,
    ) -> str:
        """The output of a client command. Clients wait minutes for a lost controller, so each call has a time limit."""
        done = subprocess.run(
            command,
            cwd=cwd,
            env=self.environment(**(extra or {})),
            input=text_in,
            stdin=subprocess.DEVNULL if text_in is None else None,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        words = " ".join(command)
        assert not check or done.returncode == 0, f"{words}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def submit(self, script: str, *options: str, cwd: Path) -> str:
        """Submit this text as a batch script. Returns the job id. The output is `out-ID.txt` in cwd."""
        text = script if script.startswith("#!") else f"#!/bin/bash\n{script}\n"
        options = ("--parsable", "--output=out-%j.txt", "--open-mode=append", *options)
        return self.run("sbatch", *options, cwd=cwd, text_in=text).strip().split(";")[0]

    def job(self, job_id: str) -> dict[str, str]:
        """The controller's fields: JobState, NodeList, Restarts, ExitCode, ..."""
        words = self.run("scontrol", "show", "job", "--oneliner", job_id).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def job_state(self, job_id: str) -> str:
        return self.job(job_id)["JobState"]

    def job_nodes(self, job_id: str) -> list[str]:
        return self.run("scontrol", "show", "hostnames", self.job(job_id)["NodeList"]).split()

    def wait_for_state(self, job_id: str, states: str | tuple[str, ...], timeout_s: float = 30) -> str:
        """Poll until the job is in one of these states. Fails at once if it ended in another."""
        wanted = (states,) if isinstance(states, str) else states

        def arrived() -> bool:
            state = self.job_state(job_id)
            assert state in wanted or state not in FINAL_STATES, f"job {job_id} ended {state}: {self.job(job_id)}"
            return state in wanted

        self.wait_until(arrived, timeout_s, f"job {job_id} in {' or '.join(wanted)}")
        return self.job_state(job_id)

    def node_state(self, node: str) -> str:
        """The state in sinfo, for example `idle`, `mixed`, `down*` (the star: it does not answer)."""
        return self.run("sinfo", "--noheader", "--Node", "--nodes", node, "--format", "%T").split()[0]

    def wait_for_node(self, node: str, states: str | tuple[str, ...], timeout_s: float = 40) -> None:
        wanted = (states,) if isinstance(states, str) else states
        self.wait_until(lambda: self.node_state(node) in wanted, timeout_s, f"{node} in {' or '.join(wanted)}")

    def wait_until(self, happened: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not happened():
            assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}\n{self._picture()}"
            time.sleep(POLL_S)

    def power_off(self, node: str) -> None:
        """Power loss: all processes of the node are killed without a message."""
        self._script("node", str(self.state), "off", node)

    def boot(self, node: str) -> None:
        """Boot, and wait until the node accepts jobs. Slurm requeues or fails its earlier jobs."""
        self._script("node", str(self.state), "boot", node)

    def cut_link(self, node: str) -> None:
        """Disconnect the network. The processes of the node continue."""
        self._script("node", str(self.state), "cut", node)

    def restore_link(self, node: str) -> None:
        self._script("node", str(self.state), "restore", node)

    @contextmanager
    def unshared(self, folder: Path, *nodes: str) -> Iterator[None]:
        """Mount an empty local folder on these nodes, as without shared storage."""
        with ExitStack() as mounted:
            for node in nodes:
                enter = ["nsenter", "-t", str(self.host_pid(node)), "-m", "-p"]  # umount reads /proc/self
                subprocess.run([*enter, "mount", "-t", "tmpfs", "none", str(folder)], check=True)
                mounted.callback(subprocess.run, [*enter, "umount", "--lazy", str(folder)], check=True)
            yield

    def cancel_all(self, timeout_s: float = 40) -> None:
        """Check that no job is in the queue, and no process of a job on a node that answers."""

        def empty() -> bool:
            self.run("scancel", "--partition=main,urgent", check=False)
            return not self.run("squeue", "--noheader", "--format=%i").strip()

        self.wait_until(empty, timeout_s, "an empty queue")

    def heal(self) -> None:
        """Restore the cluster: all nodes on and connected, no jobs, every node idle."""
        for machine in ("ctl", *self.nodes):
            self.restore_link(machine)
        self.up()
        self.cancel_all()
        for node in self.nodes:
            if self.node_state(node).startswith(("drain", "down")):
                self.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)
            self.wait_for_node(node, "idle")

    def host_pid(self, node: str) -> int:
        """The host's process number of the node's first process (for nsenter, /proc and kill)."""
        return int((self.state / "run" / f"{node}.pid").read_text())

    def log(self, name: str) -> str:
        """A daemon's log: slurmctld, slurmd-n1, ..."""
        return (self.state / "log" / f"{name}.log").read_text()

    def _picture(self) -> str:
        queue = self.run("squeue", "--states=all", check=False)
        return f"{queue}\n{self.run('sinfo', '--Node', check=False)}"

    def _script(self, name: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(SCRIPTS / name), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        assert done.returncode == 0, f"{name} {' '.join(arguments)}: {done.stderr or done.stdout}"
