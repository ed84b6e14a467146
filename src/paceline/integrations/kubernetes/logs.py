"""Logs of the pods of a job: of one pod, of all of them, or followed until the job has ended.

A stream may break although the run continues: a load balancer closes an idle connection, a kubelet rotates a log, a
pod is replaced. Each line has a timestamp, so a new stream continues after the last line shown.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from paceline.errors import PacelineError, UserError
from paceline.integrations.kubernetes.client import Cluster, ClusterUnavailable, broken_stream_errors, cluster_of
from paceline.integrations.kubernetes.state import PodView, newest_pods
from paceline.launch.job_record import JobRecord

_POLL_S = 2.0
_IDLE_S = 60  # a stream without data for this time is reopened: it may be dead
_OVERLAP_S = 5  # read again after a break; lines already shown are dropped by their timestamp
_MOST_FAILURES = 30  # consecutive, if the cluster does not answer


def choose_pod(pods: Sequence[PodView], where: str, index: int = 0) -> PodView:
    """The pod whose log to show: the newest of this index that has a log, otherwise any remaining pod."""
    own = [pod for pod in pods if pod.index == index]
    with_log = [pod for pod in own if pod.has_log] or [pod for pod in newest_pods(pods) if pod.has_log]
    if with_log:
        return with_log[-1] if own else with_log[0]
    if not pods:
        raise UserError(
            f"there is no pod {index} of this job", where=where, hint="paceline status RUN shows the reason"
        )
    waiting = newest_pods(pods)[0]
    raise UserError("there is no log yet", where=waiting.name, got=waiting.waits_for or "pending")


def read_log(cluster: Cluster, pod: PodView, api: str, last_lines: int | None) -> Iterator[bytes]:
    options = {} if last_lines is None else {"tail_lines": last_lines}
    try:
        yield from cluster.stream_log(pod.name, api, **options)
    except broken_stream_errors() as error:
        raise ClusterUnavailable("the log ended before its end", where=pod.name, got=str(error)[:300]) from error


def read_last_line(record: JobRecord) -> str:
    """The last line of the job's log; empty if it cannot be read."""
    cluster = cluster_of(record)
    try:
        pod = choose_pod(cluster.read_pods(record.job_id), record.job_id)
        text = b"".join(read_log(cluster, pod, record.api, 3))
    except PacelineError:
        return ""
    lines = [line.strip() for line in text.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""


def follow_log(record: JobRecord, last_lines: int | None, say: Callable[[str], None]) -> Iterator[bytes]:
    """Follow pod 0 and its successors until the job ends. `say` gets notes that are not part of a log."""
    cluster, position = cluster_of(record), _Position()
    failures = 0
    while True:
        try:
            is_over = not cluster.read_state(
                record.job_id, record.api
            ).is_active  # read the state before the log, so that no lines are missed
            pod = _next_pod(cluster.read_pods(record.job_id), position, is_over=is_over)
            if pod is None and is_over:
                return
            if pod is not None:
                if pod.name != position.pod:
                    _announce(pod, position, say)
                    position = _Position(pod.name)
                yield from _follow_pod(cluster, pod, record.api, position, last_lines)
                position.is_read = is_over or pod.has_ended
                last_lines = None
            failures = 0
        except ClusterUnavailable:
            failures += 1
            if failures >= _MOST_FAILURES:
                raise
        if not position.is_read:
            time.sleep(_POLL_S)


@dataclass
class _Position:
    """The reader's position in the log of a pod."""

    pod: str = ""
    is_read: bool = False  # completely: the pod had ended when its log was opened
    last_time: str = ""  # timestamp of the last line shown, comparable as text
    heard_s: float = 0.0  # when the stream last returned data
    shown_then: int = 0  # lines shown with this timestamp; some container runtimes use one timestamp for many lines
    seen_before: str = ""  # a reopened stream repeats lines up to this timestamp ...
    to_skip: int = 0  # ... and this number of lines with this timestamp

    def begin_stream(self) -> None:
        self.seen_before, self.to_skip = self.last_time, self.shown_then

    def is_new(self, moment: str) -> bool:
        """Whether the next line with this timestamp is new. Counts it as shown."""
        if moment < self.seen_before:
            return False
        if moment == self.seen_before and self.to_skip:
            self.to_skip -= 1
            return False
        self.shown_then = self.shown_then + 1 if moment == self.last_time else 1
        self.last_time = moment
        return True


def _next_pod(pods: Sequence[PodView], position: _Position, *, is_over: bool) -> PodView | None:
    """The current pod until its log is complete, then its successor. None if there is none yet."""
    own = [pod for pod in pods if pod.index == 0 and pod.has_log]
    names = [pod.name for pod in own]
    if position.pod in names:
        place = names.index(position.pod)
        return own[place] if not position.is_read else next(iter(own[place + 1 :]), None)
    if own and not (is_over and position.is_read):
        return own[-1]
    # While the job is active, wait for pod 0. After the job has ended, use the log of another pod.
    others = [pod for pod in newest_pods(pods) if pod.has_log]
    return others[0] if is_over and others and not position.pod else None


def _announce(pod: PodView, position: _Position, say: Callable[[str], None]) -> None:
    if position.pod:
        say(f"pod {pod.index} was replaced; its successor is {pod.name}")
    elif pod.index:
        say(f"pod 0 was deleted; this is the log of pod {pod.index} ({pod.name})")


def _follow_pod(
    cluster: Cluster, pod: PodView, api: str, position: _Position, last_lines: int | None
) -> Iterator[bytes]:
    options: dict[str, int] = {}
    position.begin_stream()
    if position.last_time:
        options["since_seconds"] = math.ceil(time.monotonic() - position.heard_s) + _OVERLAP_S
    elif last_lines is not None:
        options["tail_lines"] = last_lines
    rest = b""
    try:
        stream = cluster.stream_log(pod.name, api, read_timeout_s=_IDLE_S, follow=True, timestamps=True, **options)
        for chunk in stream:
            position.heard_s = time.monotonic()
            *lines, rest = (rest + chunk).split(b"\n")
            yield from (shown for line in lines if (shown := _new_line(line, position)) is not None)
    except broken_stream_errors():
        rest = b""  # a partial line; the new stream repeats it
    if rest and (shown := _new_line(rest, position)) is not None:
        yield shown


def _new_line(line: bytes, position: _Position) -> bytes | None:
    """A line without its timestamp; None if it was already shown."""
    stamp, _, text = line.partition(b" ")
    moment = _comparable(stamp.decode(errors="replace"))
    if moment is None:
        return line + b"\n"  # this server writes no timestamps
    return text + b"\n" if position.is_new(moment) else None


def _comparable(stamp: str) -> str | None:
    """Pad the fraction of a timestamp such as 2026-11-15T10:00:00.12Z to nine digits, so that it sorts as text."""
    if len(stamp) < 20 or stamp[10] != "T":
        return None
    fraction = "".join(letter for letter in stamp[19:].partition("+")[0] if letter.isdecimal())
    return f"{stamp[:19]}.{fraction[:9]:0<9}"
