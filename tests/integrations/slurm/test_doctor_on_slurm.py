"""`paceline doctor --launch slurm` on a real cluster: a slow node and a firewall, and the list for srun --exclude."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.slurm import Cluster
from paceline.training.known_training import KNOWN_HASH

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]
DOCTOR = (sys.executable, "-m", "paceline", "doctor", "--launch=slurm", "--json")


def examine(cluster: Cluster, *flags: str, cwd: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(cluster.run(*DOCTOR, *flags, cwd=cwd, check=False, timeout_s=120))
    content["by_name"] = {finding["name"]: finding for finding in content["findings"]}
    return content


def test_a_slow_node_is_named_and_excluded_from_the_next_job(cluster: Cluster, tmp_path: Path) -> None:
    content = examine(cluster, "--nodes=3", "--inject=slow rank=1", cwd=tmp_path)
    assert (content["world_size"], content["launcher"], content["hosts"]) == (3, "srun", ["n1", "n2", "n3"])
    assert [finding["name"] for finding in content["findings"] if finding["status"] == "fail"] == ["pace"]
    assert content["by_name"]["pace"]["what"].startswith("rank 1 on n2 is slow")
    assert content["by_name"]["training"]["details"]["together"] == [KNOWN_HASH] * 3
    assert content["injected"]["slow"] > 0
    assert sorted(content["facts"]) == ["n1", "n2", "n3"]  # every node examined itself
    assert (tmp_path / "exclude.txt").read_text() == "n2\n"
    where = cluster.run("sh", "-c", "srun --nodes=2 --exclude=$(cat exclude.txt) hostname", cwd=tmp_path)
    assert sorted(where.split()) == ["n1", "n3"]


def test_a_firewall_between_two_nodes_is_found_before_torch_could_hang(cluster: Cluster, tmp_path: Path) -> None:
    def on_n2(*words: str) -> None:
        subprocess.run(["nsenter", "-t", str(cluster.host_pid("n2")), "-n", "ip", "route", *words], check=True)

    address = cluster.run("srun", "--nodelist=n3", "hostname", "--ip-address").split()[0]
    on_n2("add", "prohibit", address)
    try:
        content = examine(cluster, "--nodes=3", cwd=tmp_path)
    finally:
        on_n2("del", "prohibit", address)
    assert content["healthy"] is False
    reach = content["by_name"]["reach"]
    assert reach["status"] == "fail"
    assert reach["details"]["shut"] == [[1, 2], [2, 1]]
    assert "firewall" in reach["remedy"]
    assert content["by_name"]["training"]["status"] == "skip"
    assert (tmp_path / "exclude.txt").read_text() == "n3\n"  # without n2 the other two reach each other
