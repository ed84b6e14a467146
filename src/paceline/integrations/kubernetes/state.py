"""What the objects of a cluster say about a job, in our words. Pure: no client, no network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from paceline.errors import EXIT_PREEMPTED
from paceline.integrations.kubernetes.template import INDEX
from paceline.integrations.slurm.client import JobState
from paceline.launch.policy import FINAL_CODES

Object = dict[str, Any]
_STUCK_AFTER_S = 60
_CREATE_FAILURES = ("FailedCreate", "JobCreationFailed", "CreateFailed")
OUT_OF_SERVICE = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute"
_STOPPED = (EXIT_PREEMPTED, 143)  # asked to stop: never the cause of a failure


@dataclass(frozen=True)
class PodView:
    """One pod of a job."""

    name: str
    index: int
    created: str
    phase: str
    node: str = ""
    started: str = ""
    waits_for: str = ""
    exit_code: int | None = None
    finished: str = ""
    is_disrupted: bool = False  # evicted, preempted, or its node is gone
    must_end_by: str = ""  # its deletion timestamp: when it was asked to end, plus its grace

    @property
    def has_ended(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    @property
    def is_terminating(self) -> bool:
        """Asked to end, and not ended yet: it does not train, whatever its phase says."""
        return bool(self.must_end_by) and not self.has_ended

    def is_stuck(self, now: datetime) -> bool:
        """It should have ended long ago: its node does not answer, so nothing confirms its end."""
        if not self.is_terminating:
            return False
        return (now - datetime.fromisoformat(self.must_end_by)).total_seconds() > _STUCK_AFTER_S

    @property
    def is_running(self) -> bool:
        return self.phase == "Running" and not self.is_terminating

    @property
    def has_log(self) -> bool:
        """A pod that its node refused has failed without a container."""
        return self.phase in ("Running", "Succeeded") or (self.phase == "Failed" and self.exit_code is not None)

    @property
    def was_ended_by_cluster(self) -> bool:
        """Its exit code says nothing about the training."""
        return self.is_disrupted or bool(self.must_end_by)

    @property
    def counts_as_failure(self) -> bool:
        """As the Job's podFailurePolicy counts."""
        is_failure = self.phase == "Failed" and self.exit_code not in (0, EXIT_PREEMPTED)
        return is_failure and not self.was_ended_by_cluster


def read_pods(items: Iterable[Object]) -> list[PodView]:
    """All pods of a job, oldest first."""
    return sorted((_read_pod(item) for item in items), key=lambda pod: (pod.created, pod.index, pod.name))


def newest_pods(pods: Iterable[PodView]) -> list[PodView]:
    """The newest pod of each index, by index. A pod that is being deleted gives way to its successor."""
    newest: dict[int, PodView] = {}
    for pod in pods:
        before = newest.get(pod.index)
        if before is None or not pod.is_terminating or before.is_terminating:
            newest[pod.index] = pod
    return [newest[index] for index in sorted(newest)]


def _read_pod(pod: Object) -> PodView:
    metadata, status = pod["metadata"], pod.get("status") or {}
    containers = status.get("containerStatuses") or []
    all_containers = [*(status.get("initContainerStatuses") or []), *containers]
    waiting = [item["state"]["waiting"] for item in all_containers if (item.get("state") or {}).get("waiting")]
    ended = [item["state"]["terminated"] for item in containers if (item.get("state") or {}).get("terminated")]
    conditions = status.get("conditions") or []
    unscheduled = [item for item in conditions if item["type"] == "PodScheduled" and item["status"] == "False"]
    return PodView(
        name=metadata["name"],
        index=int((metadata.get("annotations") or {}).get(INDEX, 0)),
        created=str(metadata.get("creationTimestamp") or ""),
        phase=status.get("phase") or "Pending",
        node=(pod.get("spec") or {}).get("nodeName") or "",
        started=str(status.get("startTime") or ""),
        waits_for=next((text for text in map(in_words, waiting + unscheduled) if text), ""),
        exit_code=next((item.get("exitCode") for item in ended), None),
        finished=next((str(item.get("finishedAt") or "") for item in ended), ""),
        is_disrupted=any(item["type"] == "DisruptionTarget" and item["status"] == "True" for item in conditions),
        must_end_by=str(metadata.get("deletionTimestamp") or ""),
    )


def in_words(item: Object) -> str:
    """The reason and the message of a condition, a waiting container or an event."""
    return f"{item.get('reason') or ''}: {item.get('message') or ''}".strip(": ")


def read_job_state(name: str, found: Object, pods: Sequence[PodView], events: Sequence[Object] = ()) -> JobState:
    """The state of a Job, JobSet or TrainJob, from the object, all of its pods and events that tell of trouble."""
    held = {item["type"]: item for item in _status(found).get("conditions") or [] if item.get("status") == "True"}
    newest = newest_pods(pods)
    nodes = ",".join(dict.fromkeys(pod.node for pod in newest if pod.node))
    failures = _count_failures(found, pods)
    if "Complete" in held or "Completed" in held:
        return JobState(name, "COMPLETED", nodes=nodes, restarts=failures)
    if "Failed" in held:
        code = _deciding_code(held["Failed"], pods)
        return JobState(name, "FAILED", in_words(held["Failed"]), nodes, restarts=failures, exit_code=code)
    if found["metadata"].get("deletionTimestamp"):
        return JobState(name, "COMPLETING", _deletion_in_words(newest), nodes)
    if "Suspended" in held or (found.get("spec") or {}).get("suspend"):
        queue = (found["metadata"].get("labels") or {}).get("kueue.x-k8s.io/queue-name", "")
        return JobState(name, "PENDING", f"in queue {queue}" if queue else "suspended", restarts=failures)
    running = [pod for pod in newest if pod.is_running]
    done = [pod for pod in newest if pod.phase == "Succeeded"]
    wanted = _count_wanted(found) or len(newest)
    if newest and len(running) + len(done) >= wanted:
        return JobState(name, "RUNNING", nodes=nodes, running_for=_age(running or done), restarts=failures)
    return JobState(name, "PENDING", _why_waiting(newest, len(running), wanted, events), nodes, restarts=failures)


def _status(found: Object) -> Object:
    return found.get("status") or {}


def _count_wanted(found: Object) -> int:
    """Pods that the job has when it is complete; 0: its object does not say."""
    spec = found.get("spec") or {}
    if "trainer" in spec:
        return int(spec["trainer"].get("numNodes") or 0)
    inner = [item["template"]["spec"] for item in spec.get("replicatedJobs") or []] or [spec]
    return sum(int(item.get("completions") or 0) for item in inner)


def _count_failures(found: Object, pods: Sequence[PodView]) -> int:
    """Failures that count. A Job's own `failed` includes pods that the controller or an eviction has ended."""
    restarts = int(_status(found).get("restarts") or 0)  # of a JobSet, which deletes the pods of earlier attempts
    return max(restarts, sum(pod.counts_as_failure for pod in pods))


def _deciding_code(failed: Object, pods: Sequence[PodView]) -> str:
    """The exit code behind a failure: a final one, else the last that counts. Stops and deleted pods decide nothing."""
    if failed.get("reason") == "DeadlineExceeded":
        return ""
    ended = sorted((pod for pod in pods if pod.exit_code), key=lambda pod: pod.finished)
    own = [pod for pod in ended if not pod.was_ended_by_cluster]
    final = [pod for pod in own or ended if pod.exit_code in FINAL_CODES]
    if final:
        return str(final[0].exit_code)
    counted = [pod for pod in own if pod.exit_code not in _STOPPED]
    last = (counted or own or ended)[-1:]
    return str(last[0].exit_code) if last else ""


def _deletion_in_words(pods: Sequence[PodView]) -> str:
    left = [pod for pod in pods if pod.phase in ("Pending", "Running")]
    return f"it is being deleted; {len(left)} pods save and end" if left else "it is being deleted"


def _why_waiting(pods: Sequence[PodView], running: int, wanted: int, events: Sequence[Object]) -> str:
    now = datetime.now(UTC)
    reasons = [_stuck_in_words(pod) for pod in pods if pod.is_stuck(now)]
    reasons += [pod.waits_for for pod in pods if pod.waits_for]
    reasons += [f"pod {pod.index} on {pod.node} is being ended" for pod in pods if pod.is_terminating]
    reasons += [f"pod {pod.index} ended with {pod.exit_code}" for pod in pods if pod.phase == "Failed"]
    if len(pods) < wanted:  # a pod that cannot be created has no object that could say why
        reasons += [in_words(event) for event in events]
    what = f"{running} of {wanted} pods run" if pods else "no pod yet"
    return "; ".join([what, *reasons[:1]])


def _stuck_in_words(pod: PodView) -> str:
    return (
        f"pod {pod.index} was evicted and has not ended: node {pod.node} does not answer; no other pod takes its place."
        f" If the node is down for good: kubectl taint nodes {pod.node} {OUT_OF_SERVICE};"
        f" without rights on nodes: kubectl delete pod {pod.name} --force --grace-period=0"
    )


def sort_events(items: Iterable[Object]) -> list[Object]:
    """Events that tell why a pod cannot be created, the newest first."""
    kept = [item for item in items if item.get("type") == "Warning" and item.get("reason") in _CREATE_FAILURES]
    return sorted(kept, key=lambda item: str(item.get("lastTimestamp") or item.get("eventTime") or ""), reverse=True)


def _age(pods: Sequence[PodView]) -> str:
    starts = [datetime.fromisoformat(pod.started) for pod in pods if pod.started]
    if not starts:
        return ""
    seconds = int((datetime.now(UTC) - max(starts)).total_seconds())
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
