"""Messages of sbatch get a next step."""

from __future__ import annotations

import pytest

from paceline.integrations.slurm.client import hint_for


@pytest.mark.parametrize(
    ("message", "step"),
    [
        ("Invalid partition name specified", "--partition"),
        ("No partition specified or system default partition", "--partition"),
        ("User's group not permitted to use this partition", "--partition"),
        ("Requested partition configuration not available now", "--partition"),
        ("Invalid account or account/partition combination specified", "--account"),
        ("Invalid qos specification", "--qos"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "--time"),
        ("Requested node configuration is not available", "sinfo"),
        ("Node count specification invalid", "--nodes"),
        ("Memory specification can not be satisfied", "--mem"),
        ("Invalid generic resource (gres) specification", "sinfo"),
        ("Invalid feature specification", "--constraint"),
        ("Requested reservation is invalid", "--reservation"),
        ("Invalid job array specification", "--array"),
        ("Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)", "--qos"),
        ("Requeue of jobs is disabled", "requeue"),
        ("Unable to contact slurm controller (connect failure)", "scontrol ping"),
        ("Socket timed out on send/recv operation", "squeue --me"),
        ("Invalid authentication credential", "munge"),
        ("fatal: Could not establish a configuration source", "SLURM_CONF"),
    ],
)
def test_a_known_message_has_a_next_step(message: str, step: str) -> None:
    """Each common message names what to change or where to look."""
    hint = hint_for(f"sbatch: error: Batch job submission failed: {message}")
    assert hint is not None
    assert step in hint


def test_a_message_of_the_site_has_none() -> None:
    """The message of a plugin has its own advice."""
    assert hint_for("sbatch: error: please buy a larger project") is None
