"""One pod of several: it waits for the others, trains with them, and ends or restarts together with them.

    python -m paceline.integrations.kubernetes.pod train RECIPE [flags]

Kubernetes replaces a lost pod by a new one, and the other pods do not notice. So each pod runs this program around its
`paceline train`. The pods are a gang (`launch/gang.py`): if one is lost, all restart from the newest checkpoint as soon
as a new pod has connected. A pod that has finished waits for the others, because Kubernetes does not start it again.

No pod waits forever: if the gang is not complete within the start timeout, it ends with an error that names the missing
nodes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from types import FrameType

from paceline.errors import EXIT_PREEMPTED, PacelineError, UserError, printable
from paceline.launch.gang import Gang, GangMember, free_port
from paceline.launch.gang_messages import Outcome, is_failure
from paceline.runs.interpreter import python_command
from paceline.runs.machine import ProcessHandle, end_group, exit_code_of
from paceline.runtime.detect import Nodes, agent_variables
from paceline.runtime.secret import read_secret
from paceline.settings.values import START_TIMEOUT, read_number

NODES, NODE, LEADER = "PACELINE_NODES", "PACELINE_NODE", "PACELINE_LEADER"
_CONTEXT = "pods of a job"
_START_TIMEOUT_S = 900.0
_STOP_GRACE_S = 5.0  # for ranks whose peers are lost: they can only finish writing a checkpoint
# The Job controller deletes the remaining pods when the first one fails for good, and their logs with them. So the
# leader ends first. Its log contains the last lines of the others.
_LEADER_ENDS_WITHIN_S = 30.0
_FAILURE_IS_REPORTED_WITHIN_S = 10.0  # by the kubelet, to the API server
_POLL_S = 0.1
_STDERR_TAIL_BYTES = 4000
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def read_member(environment: Mapping[str, str] = os.environ) -> GangMember:
    """This pod, from the variables that the manifest sets."""
    secret = read_secret(environment)
    host, _, port = environment.get(LEADER, "").rpartition(":")
    try:
        member = GangMember(
            node=int(environment[NODE]),
            nodes=int(environment[NODES]),
            host=host,
            ports=(int(port),),
            context=_CONTEXT,
            timeout_s=read_number(START_TIMEOUT, _START_TIMEOUT_S, environment),
            hint="kubectl get pods: are all of them running? --start-timeout-s waits longer",
            secret=secret,
        )
        if not (host and 0 <= member.node < member.nodes):
            raise ValueError(f"node {member.node} of {member.nodes}, leader at {environment[LEADER]!r}")
    except (KeyError, ValueError) as error:
        raise UserError(
            "the variables of this pod are incomplete",
            where=f"{NODES}, {NODE}, {LEADER}",
            got=f"{type(error).__name__}: {error}",
            hint="paceline submit kubernetes writes them into the manifest",
        ) from error
    return member


class Pod:
    """Runs attempts until the gang ends."""

    def __init__(self, member: GangMember, command: list[str]) -> None:
        self._member = member
        self._command = command
        self._gang = Gang(member)
        self._child: ProcessHandle | None = None
        self._stop_signal = 0

    def run(self) -> int:
        """Returns the exit code of the pod."""
        for number in _SIGNALS:
            signal.signal(number, self._pass_on)
        while True:
            start = self._gang.join(make_plan=lambda nodes: (free_port(), {}), is_stopped=self._is_stopped)
            if start is None:
                return EXIT_PREEMPTED  # there is nothing to save
            outcome, code = self._train(start.port)
            if outcome.action == "end" and is_failure(outcome.code) and not self._member.is_leader:
                self._gang.wait_for_disconnect(_LEADER_ENDS_WITHIN_S, self._is_stopped)
                self._wait_for_stop(_FAILURE_IS_REPORTED_WITHIN_S)
            self._gang.disconnect()
            if self._stop_signal:
                return code
            if outcome.action == "end" or (outcome.action == "replace" and outcome.node == self._member.node):
                return outcome.code
            self._print(f"restart from the newest checkpoint, when all {self._member.nodes} nodes are connected")

    def _train(self, port: int) -> tuple[Outcome, int]:
        """Train until the gang has an outcome. Also returns the exit code of this pod's training."""
        # The leader's own name may not be known to itself yet. The other pods have just reached it by that name.
        host = "localhost" if self._member.is_leader else self._member.host
        nodes = Nodes(self._member.nodes, self._member.node, host, port)
        child = subprocess.Popen(
            self._command,
            env={**os.environ, **agent_variables(nodes)},
            start_new_session=True,  # to end the whole group at once
            stderr=subprocess.PIPE,
        )
        stderr = _StderrTail(child)

        def report() -> None:
            with suppress(ChildProcessError):  # the outcome came first, and the child was ended and reaped below
                os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # not reaped: its group can be signalled
                code = _exit_code(child)
                self._gang.report_end(code, stderr.read() if is_failure(code) else "")

        reporter = threading.Thread(target=report, daemon=True)
        self._child = ProcessHandle(child.pid)
        if self._stop_signal:  # it arrived before there was a child
            self._child.send(self._stop_signal)
        reporter.start()
        outcome = self._gang.wait_for_outcome()
        for node, error in dict(self._gang.errors).items():
            self._print(f"the last lines of node {node}:\n{printable(error)}")
        if outcome.is_failure:
            self._print(printable(outcome.reason))
        end_group(child, grace_s=_STOP_GRACE_S)  # also ranks that have outlived the supervisor
        self._child = None
        reporter.join()  # it must not report to the next attempt
        return outcome, _exit_code(child)

    def _is_stopped(self) -> bool:
        return self._stop_signal != 0

    def _wait_for_stop(self, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not self._stop_signal and time.monotonic() < deadline_s:
            time.sleep(_POLL_S)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._stop_signal = self._stop_signal or number
        if self._child is not None:
            self._child.send(number)

    def _print(self, text: str) -> None:
        print(f"node {self._member.node}: {text}", file=sys.stderr, flush=True)


class _StderrTail:
    """Copies the standard error of a child to ours and keeps the end of it."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        assert child.stderr is not None
        self._pipe = child.stderr
        self._tail = b""
        self._thread = threading.Thread(target=self._copy, name="stderr", daemon=True)
        self._thread.start()

    def read(self, timeout_s: float = 1.0) -> str:
        """The last lines. A process that outlives the child may hold the pipe open, so the wait is limited."""
        self._thread.join(timeout_s)
        return self._tail.decode(errors="replace").strip()

    def _copy(self) -> None:
        with self._pipe, suppress(OSError):
            while chunk := os.read(self._pipe.fileno(), 1 << 16):
                self._tail = (self._tail + chunk)[-_STDERR_TAIL_BYTES:]
                with suppress(OSError):  # our own standard error may be closed; the child must not fail because of it
                    while chunk:
                        chunk = chunk[os.write(sys.stderr.fileno(), chunk) :]


def _exit_code(child: subprocess.Popen[bytes]) -> int:
    """As in a shell: 128 + N if signal N has ended it."""
    code = exit_code_of(child)
    assert code is not None
    return code if code >= 0 else 128 - code


def main(arguments: list[str]) -> int:
    try:
        return Pod(read_member(), python_command("-m", "paceline", *arguments)).run()
    except PacelineError as error:
        print(error.screen(), file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without waiting for the threads that read connections
