"""The state of a job, computed from the objects of the cluster. Pure: no client, no network."""

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
_STOPPED = (EXIT_PREEMPTED, 143)  # exit codes after a stop request: never the cause of a failure


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
    is_disrupted: bool = False  # evicted, preempted, or its node was lost
    must_end_by: str = ""  # the deletion timestamp: the time of the request plus the grace period

    @property
    def has_ended(self) -> bool:
        return self.phase in ("Succeeded", "Failed")

    @property
    def is_terminating(self) -> bool:
        """Deletion was requested and the pod has not ended. It does not train, also if its phase is Running."""
        return bool(self.must_end_by) and not self.has_ended

    def is_stuck(self, now: datetime) -> bool:
        """The grace period is long over. The node does not answer, so the end of the pod is not confirmed."""
        if not self.is_terminating:
            return False
        return (now - datetime.fromisoformat(self.must_end_by)).total_seconds() > _STUCK_AFTER_S

    @property
    def is_running(self) -> bool:
        return self.phase == "Running" and not self.is_terminating

    @property
    def has_log(self) -> bool:
        """A pod that its node rejected has failed without a container."""
        return self.phase in ("Running", "Succeeded") or (self.phase == "Failed" and self.exit_code is not None)

    @property
    def was_ended_by_cluster(self) -> bool:
        """Then the exit code is not the result of the training."""
        return self.is_disrupted or bool(self.must_end_by)

    @property
    def counts_as_failure(self) -> bool:
        """Whether the Job's podFailurePolicy counts it."""
        is_failure = self.phase == "Failed" and self.exit_code not in (0, EXIT_PREEMPTED)
        return is_failure and not self.was_ended_by_cluster


def read_pods(items: Iterable[Object]) -> list[PodView]:
    """All pods of a job, oldest first."""
    return sorted((_read_pod(item) for item in items), key=lambda pod: (pod.created, pod.index, pod.name))


def newest_pods(pods: Iterable[PodView]) -> list[PodView]:
    """The newest pod of each index, by index. A pod that is being deleted is replaced by its successor."""
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
        waits_for=next((text for text in map(reason_text, waiting + unscheduled) if text), ""),
        exit_code=next((item.get("exitCode") for item in ended), None),
        finished=next((str(item.get("finishedAt") or "") for item in ended), ""),
        is_disrupted=any(item["type"] == "DisruptionTarget" and item["status"] == "True" for item in conditions),
        must_end_by=str(metadata.get("deletionTimestamp") or ""),
    )


def reason_text(item: Object) -> str:
    """The reason and the message of a condition, a waiting container or an event."""
    return f"{item.get('reason') or ''}: {item.get('message') or ''}".strip(": ")


def read_job_state(name: str, found: Object, pods: Sequence[PodView], events: Sequence[Object] = ()) -> JobState:
    """The state of a Job, JobSet or TrainJob, from the object, all its pods and its warning events."""
    held = {item["type"]: item for item in _status(found).get("conditions") or [] if item.get("status") == "True"}
    newest = newest_pods(pods)
    nodes = ",".join(dict.fromkeys(pod.node for pod in newest if pod.node))
    failures = _count_failures(found, pods)
    if "Complete" in held or "Completed" in held:
        return JobState(name, "COMPLETED", nodes=nodes, restarts=failures)
    if "Failed" in held:
        code = _deciding_code(held["Failed"], pods)
        return JobState(name, "FAILED", reason_text(held["Failed"]), nodes, restarts=failures, exit_code=code)
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
    """The number of pods of a complete job; 0 if unknown."""
    spec = found.get("spec") or {}
    if "trainer" in spec:
        return int(spec["trainer"].get("numNodes") or 0)
    inner = [item["template"]["spec"] for item in spec.get("replicatedJobs") or []] or [spec]
    return sum(int(item.get("completions") or 0) for item in inner)


def _count_failures(found: Object, pods: Sequence[PodView]) -> int:
    """Failures that count. The Job's field `failed` also includes pods that the controller or an eviction ended."""
    restarts = int(_status(found).get("restarts") or 0)  # a JobSet deletes the pods of earlier attempts
    return max(restarts, sum(pod.counts_as_failure for pod in pods))


def _deciding_code(failed: Object, pods: Sequence[PodView]) -> str:
    """The exit code that caused a failure: a final one, else the last that counts. Ignores stopped and deleted pods."""
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
    if len(pods) < wanted:  # a pod that cannot be created has no object; events have the reason
        reasons += [reason_text(event) for event in events]
    what = f"{running} of {wanted} pods run" if pods else "no pod yet"
    return "; ".join([what, *reasons[:1]])


def _stuck_in_words(pod: PodView) -> str:
    return (
        f"pod {pod.index} was evicted and has not ended: node {pod.node} does not answer; no other pod takes its place."
        f" If the node is down for good: kubectl taint nodes {pod.node} {OUT_OF_SERVICE};"
        f" without rights on nodes: kubectl delete pod {pod.name} --force --grace-period=0"
    )


def sort_events(items: Iterable[Object]) -> list[Object]:
    """Events about pods that cannot be created, newest first."""
    kept = [item for item in items if item.get("type") == "Warning" and item.get("reason") in _CREATE_FAILURES]
    return sorted(kept, key=lambda item: str(item.get("lastTimestamp") or item.get("eventTime") or ""), reverse=True)


def _age(pods: Sequence[PodView]) -> str:
    starts = [datetime.fromisoformat(pod.started) for pod in pods if pod.started]
    if not starts:
        return ""
    seconds = int((datetime.now(UTC) - max(starts)).total_seconds())
    return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"
