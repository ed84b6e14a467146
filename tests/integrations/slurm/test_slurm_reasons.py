"""The reasons why a Slurm job waits, in plain words."""

from __future__ import annotations

import pytest

from paceline.integrations.slurm.client import explain_reason


@pytest.mark.parametrize(
    ("reason", "never"),
    [
        ("Priority", False),
        ("Resources", False),
        ("ReqNodeNotAvail, UnavailableNodes:n2", False),
        ("PartitionTimeLimit", True),
        ("BadConstraints", True),
        ("QOSMaxCpuPerJobLimit", True),
        ("AssocMaxWallDurationPerJobLimit", True),
        ("QOSMinGRES", True),
        ("QOSMaxJobsPerUserLimit", False),
        ("AssocGrpCpuLimit", False),
        ("AssocGrpGRESMinutes", False),
        ("AssocGrpCPURunMinutesLimit", False),
        ("MaxGRESPerAccount", False),
        ("PartitionNodeLimit", True),
        ("PartitionConfig", True),
        ("PartitionDown", False),
        ("AccountNotAllowed", True),
        ("QOSNotAllowed", True),
        ("MaxMemPerLimit", True),
        ("AssocMaxNodePerJobLimit", True),
        ("QOSMaxMemoryPerNode", True),
        ("AssocMaxJobsLimit", False),
        ("Job's account not known, so it can't use this partition (short allows lab)", True),
        ("Job's QOS not permitted to use this partition (lab allows long not normal)", True),
        ("launch failed requeued held", True),
        ("job requeued in held state", True),
        ("(Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions)", False),
    ],
)
def test_a_reason_says_whether_the_job_can_start(reason: str, never: bool) -> None:
    """A limit of one job stays. A limit of a group ends when other jobs end."""
    waiting = explain_reason(reason)
    assert waiting is not None
    assert waiting.never == never
    assert ("not start by itself" in str(waiting)) == never


def test_minutes_of_running_jobs_differ_from_a_used_up_budget() -> None:
    """One ends by itself, the other needs an administrator."""
    running, used = explain_reason("QOSGrpMemoryRunMinutes"), explain_reason("QOSGrpMemoryMinutes")
    assert running is not None
    assert used is not None
    assert running.reason != used.reason


def test_a_reason_of_the_site_is_unchanged() -> None:
    assert explain_reason("SiteFactor") is None
