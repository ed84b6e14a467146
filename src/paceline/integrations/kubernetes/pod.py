"""One pod of several: it meets the others, trains beside them, and ends or begins again together with them.

    python -m paceline.integrations.kubernetes.pod train RECIPE [flags]

Kubernetes replaces a lost pod by a new one, alone; the others know nothing of it. So each pod runs this around its
`paceline train`. Node 0 leads: it listens at an address all of them know, and when everyone is there it says "go".
The connections stay open. Whoever dies drops one, and all begin again from the newest checkpoint as soon as a new pod
has taken the empty place; whoever is done waits for the others, because a pod that has left is never started again.

No pod waits for ever: a gang that is not complete within the start deadline ends, with an error that names who is
missing.
"""

from __future__ import annotations

import math
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from queue import Empty, SimpleQueue
from types import FrameType

from paceline.errors import EXIT_PREEMPTED, PacelineError
from paceline.integrations.kubernetes.gang import (
    Event,
    Events,
    Line,
    Place,
    Verdict,
    is_failure,
    judge,
    listen_at,
    read_ended,
    read_go,
    read_hello,
    read_last_words,
    read_place,
    read_verdict,
)
from paceline.launch.stderr_tail import StderrTail
from paceline.runs.interpreter import python_command
from paceline.runs.process_handle import ProcessHandle, end_group, exit_code_of
from paceline.runtime.detect import Nodes, agent_variables
from paceline.runtime.peers import MalformedMessage, Message, Peer, PeerServer, connect, log_drop
from paceline.runtime.signals import HEAR_SIGNALS_S

_RETRY_S = 0.2
_CONNECT_TIMEOUT_S = 2.0
_STOP_GRACE_S = 5.0  # for ranks whose peers are gone: all they can do is finish writing a checkpoint
# The Job controller deletes the pods that are left when the first one fails for good, and their logs with them. So the
# leader ends first. Its log has the last words of the others.
_LEADER_ENDS_WITHIN_S = 30.0
_FAILURE_IS_REPORTED_WITHIN_S = 10.0  # by the kubelet, to the API server
_FIRST_PORT, _PORTS, _PORTS_OF_JOB = 20_000, 20_000, 64  # below those a system gives to whoever asks for any
_CONTEXT = "pods of a job"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class Pod:
    """The life of a pod: gather, ride, and once more if need be."""

    def __init__(self, place: Place, command: list[str]) -> None:
        self.place = place
        self._command = command
        self._events: Events = SimpleQueue()
        self._early: list[Event] = []  # who has come for the next gathering already
        self._lines: dict[int, Line] = {}  # of the leader: to its followers; of a follower: to the leader
        self._child: subprocess.Popen[bytes] | None = None
        self._stderr: StderrTail | None = None  # of the child
        self._handle: ProcessHandle | None = None  # of the child
        self._stop_signal = 0

    def run(self) -> int:
        """Returns the exit code of the pod."""
        for number in _SIGNALS:
            signal.signal(number, self._pass_on)
        if self.place.leads:
            PeerServer(listen_at(self.place.port), self.place.secret, _CONTEXT, self._admit)
        while True:
            port = self._gather() if self.place.leads else self._join()
            if port is None:
                return EXIT_PREEMPTED  # asked to stop, and there is nothing to save
            verdict = self._ride(port)
            code = self._end_child()
            if verdict.do == "end" and is_failure(verdict.code) and not self.place.leads:
                self._let_leader_end_first()
            self._leave_lines()
            if self._stop_signal:
                return code
            if verdict.do == "end" or (verdict.do == "fail" and verdict.node == self.place.node):
                return verdict.code
            self._tell(f"once more from the newest checkpoint, when all {self.place.nodes} nodes are here")

    # --- Meeting

    def _admit(self, peer: Peer) -> None:
        Line(peer, self._events)

    def _gather(self) -> int | None:
        """As the leader: wait for every other node, then tell them the port at which their agents meet."""
        deadline_s = time.monotonic() + self.place.start_timeout_s
        early, self._early = self._early, []
        for hello in early:
            self._welcome(hello)
        while len(self._lines) < self.place.nodes - 1:
            if self._stop_signal:
                return None
            event = self._next_event(deadline_s)
            if event is None:
                raise self._incomplete()
            self._welcome(event)
        port = _free_port()
        for line in self._lines.values():
            line.say(go=port)
        return port

    def _welcome(self, event: Event) -> None:
        """Somebody has come, or has gone before all were there."""
        line, node = event.line, self._newcomer(event)
        if line is None:
            return
        if node is not None and line.is_open:
            line.node = node
            before = self._lines.pop(node, None)
            if before is not None:
                before.close()
            self._lines[node] = line
        elif event.kind == "lost" and self._lines.get(line.node) is line:
            del self._lines[line.node]

    def _newcomer(self, event: Event) -> int | None:
        """The node that says hello by this event. A connection that says something else first is closed."""
        if event.kind != "word" or event.line is None or event.line.node >= 0:
            return None
        try:
            return read_hello(event.content, self.place.nodes)
        except MalformedMessage as error:
            log_drop(event.line.address, error.what)
            event.line.close()
            return None

    def _incomplete(self) -> PacelineError:
        missing = [str(node) for node in range(1, self.place.nodes) if node not in self._lines]
        return PacelineError(
            f"{len(missing)} of {self.place.nodes} nodes did not arrive within {self.place.start_timeout_s:.0f} s",
            where=f"{self.place.host}:{self.place.port}",
            got=f"missing: node {', '.join(missing)}",
            hint="kubectl get pods: are they pending, or do they fail? --start-timeout-s waits longer",
        )

    def _join(self) -> int | None:
        """As a follower: until the leader says go. Its name may not be known yet, or still mean the pod before."""
        deadline_s = time.monotonic() + self.place.start_timeout_s
        trouble = "all were not there"
        while time.monotonic() < deadline_s:
            if self._stop_signal:
                return None
            try:
                peer = connect(self.place.host, self.place.port, self.place.secret, _CONTEXT, _CONNECT_TIMEOUT_S)
            except OSError as error:
                trouble = str(error)
            else:
                line = self._lines[0] = Line(peer, self._events)
                line.say(hello=self.place.node)
                port = self._wait_for_go(line, deadline_s)
                if port is not None:
                    return port
                line.close()
            time.sleep(_RETRY_S)
        raise PacelineError(
            f"node 0 did not say go within {self.place.start_timeout_s:.0f} s",
            where=f"{self.place.host}:{self.place.port}",
            got=trouble,
            hint="kubectl get pods: is the pod of index 0 running? --start-timeout-s waits longer",
        )

    def _wait_for_go(self, line: Line, deadline_s: float) -> int | None:
        while not self._stop_signal and (event := self._next_event(deadline_s)) is not None:
            if event.line is line and event.kind == "lost":
                return None
            if event.line is line:
                try:
                    return read_go(event.content)
                except MalformedMessage as error:
                    log_drop(line.address, error.what)
        return None

    def _next_event(self, deadline_s: float) -> Event | None:
        """None when the time is up."""
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            try:
                return self._events.get(timeout=min(left_s, HEAR_SIGNALS_S))
            except Empty:
                if left_s == 0.0:
                    return None

    # --- Riding

    def _ride(self, port: int) -> Verdict:
        """Train until the gang knows how it goes on."""
        self._start_child(port)
        codes: dict[int, int] = {}  # how nodes have ended, in that order; only the leader hears of all
        while True:
            event = self._next_event(math.inf)
            assert event is not None
            line, words = event.line, event.content
            is_ours = line is not None and self._lines.get(line.node if self.place.leads else 0) is line
            if event.kind == "child":
                if self._child is None or words is not self._child:
                    continue  # of an earlier round
                codes[self.place.node] = _exit_code(self._child)
                if not self.place.leads:
                    self._report_end(codes[self.place.node])
            elif event.kind == "lost" and is_ours:
                return self._after_loss(line)
            elif event.kind == "word" and is_ours and line is not None:
                verdict = self._hear(line, words, codes)
                if verdict is not None:
                    return verdict
            elif self.place.leads and (node := self._newcomer(event)) is not None:
                self._early.append(event)
                if node in self._lines:  # its pod was replaced, though nothing was heard of the end of the other
                    return self._after_loss(self._lines[node])
            verdict = judge(codes, self.place.nodes) if self.place.leads else None
            if verdict is not None:
                self._announce(verdict)
                return verdict

    def _hear(self, line: Line, message: Message, codes: dict[int, int]) -> Verdict | None:
        """A follower's end goes into `codes`; the leader's verdict is returned. Anything else is dropped."""
        try:
            if not self.place.leads:
                return read_verdict(message, self.place.nodes)
            code, words = read_ended(message), read_last_words(message)
            if line.node not in codes:  # it ends once
                codes[line.node] = code
                if is_failure(code):
                    self._tell(f"node {line.node} ended with {code}" + (f" and said:\n{words}" if words else ""))
        except MalformedMessage as error:
            log_drop(line.address, error.what)
        return None

    def _after_loss(self, line: Line | None) -> Verdict:
        who = f"node {line.node}" if self.place.leads and line is not None else "node 0, which leads,"
        self._tell(f"{who} is gone")
        self._announce(Verdict("again"))
        return Verdict("again")

    def _announce(self, verdict: Verdict) -> None:
        if self.place.leads:
            for line in self._lines.values():
                line.say(do=verdict.do, code=verdict.code, node=verdict.node)

    def _report_end(self, code: int) -> None:
        """As a follower: how the training has ended here, and why."""
        assert self._stderr is not None
        self._lines[0].say(ended=code, words=self._stderr.read() if is_failure(code) else "")

    def _let_leader_end_first(self) -> None:
        """Until the leader's end is known to the cluster, or this pod is asked to end."""
        self._wait_for_loss_of(self._lines[0], _LEADER_ENDS_WITHIN_S)
        self._wait_for_loss_of(None, _FAILURE_IS_REPORTED_WITHIN_S)

    def _wait_for_loss_of(self, line: Line | None, timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not self._stop_signal and not (line is not None and not line.is_open):
            if self._next_event(deadline_s) is None:
                return

    def _leave_lines(self) -> None:
        """What was said in this round is not for the next one, but for who has come for it."""
        for line in self._lines.values():
            line.close()
        self._lines.clear()
        with suppress(Empty):
            while True:
                event = self._events.get_nowait()
                if self.place.leads and self._newcomer(event) is not None:
                    self._early.append(event)

    # --- The training itself

    def _start_child(self, port: int) -> None:
        # The leader's own name may take a while to be known; the others have just reached it by that.
        host = "localhost" if self.place.leads else self.place.host
        self._child = child = subprocess.Popen(
            self._command,
            env={**os.environ, **agent_variables(Nodes(self.place.nodes, self.place.node, host, port))},
            start_new_session=True,  # so that all of it can be ended at once
            stderr=subprocess.PIPE,
        )
        self._stderr = StderrTail(child)

        def wait() -> None:
            os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # not reaped: `_end_child` still signals its group
            self._events.put(Event("child", None, child))

        threading.Thread(target=wait, daemon=True).start()
        self._handle = ProcessHandle(child.pid)
        if self._stop_signal:  # it came between the last look and the start
            self._handle.send(self._stop_signal)

    def _end_child(self) -> int:
        """It has ended; or its peers are gone, and it must."""
        child = self._child
        assert child is not None
        end_group(child, grace_s=_STOP_GRACE_S)  # and ranks that have outlived it
        self._child = self._handle = None
        return _exit_code(child)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._stop_signal = self._stop_signal or number
        if self._handle is not None:
            self._handle.send(number)
        self._events.put(Event("signal"))

    def _tell(self, text: str) -> None:
        print(f"node {self.place.node}: {text}", file=sys.stderr, flush=True)


def _exit_code(child: subprocess.Popen[bytes]) -> int:
    """As a shell says it: a supervisor that was killed is a failure like another."""
    code = exit_code_of(child)
    assert code is not None
    return code if code >= 0 else 128 - code


def _free_port() -> int:
    """The first of some in a row that are free here: each attempt of the agents takes the next one."""
    while True:
        first = _FIRST_PORT + _PORTS_OF_JOB * random.randrange(_PORTS // _PORTS_OF_JOB)
        try:
            for port in range(first, first + 8):
                socket.create_server(("", port)).close()
        except OSError:
            continue
        return first


def main(arguments: list[str]) -> int:
    try:
        return Pod(read_place(), python_command("-m", "paceline", *arguments)).run()
    except PacelineError as error:
        print(error.screen(), file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without waiting for the threads that listen
