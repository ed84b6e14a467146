"""One cluster for all tests of this folder: two nodes for a job, and a spare."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from harness.slurm import Cluster, need_slurm


@pytest.fixture(scope="session")
def running_cluster() -> Iterator[Cluster]:
    need_slurm()
    with Cluster(nodes=3, cpus=4, gpus=2) as cluster:
        yield cluster


@pytest.fixture
def cluster(running_cluster: Cluster) -> Cluster:
    """The cluster, restored after the test before."""
    running_cluster.heal()
    return running_cluster
