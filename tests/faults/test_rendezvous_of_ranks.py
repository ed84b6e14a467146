"""Fault 14: ranks that cannot connect. They are started by hand, as by a wrong launch script."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.cli import environment
from harness.short_run import FLAGS
from harness.sockets import free_port

ALONE = [flag for flag in FLAGS if "processes" not in flag]


@contextmanager
def foreign_listener() -> Iterator[int]:
    """A server of another program. It accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def start_rank(rank: int, folder: Path, *, port: int, host: str = "127.0.0.1") -> tuple[int, str, float]:
    """Start one of two ranks alone. Returns its exit code, its output and its duration."""
    surroundings = environment(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR=host,
        MASTER_PORT=str(port),
        PACELINE_START_TIMEOUT_S="5",
    )
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "paceline", *ALONE],
        cwd=folder,
        env=surroundings,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    return done.returncode, done.stderr, time.monotonic() - began


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.faults
def test_a_port_used_by_another_program(rank: int, tmp_path: Path) -> None:
    with foreign_listener() as port:
        code, words, seconds = start_rank(rank, tmp_path, port=port)
    assert code == 70, words
    assert seconds <= 15 + 5  # five seconds to import torch on a busy machine
    assert f"127.0.0.1:{port}" in words
    assert "another MASTER_PORT" in words
    assert "Traceback" not in words


@pytest.mark.faults
def test_a_wrong_host(tmp_path: Path) -> None:
    code, words, seconds = start_rank(1, tmp_path, host="no-such-host.invalid", port=free_port())
    assert code == 70, words
    assert seconds <= 15 + 5
    assert "there is no host 'no-such-host.invalid'" in words


@pytest.mark.parametrize(("rank", "says"), [(0, "missing: rank 1"), (1, "127.0.0.1:")])
@pytest.mark.faults
def test_a_rank_that_never_connects_is_named(rank: int, says: str, tmp_path: Path) -> None:
    code, words, seconds = start_rank(rank, tmp_path, port=free_port())
    assert code == 70, words
    assert seconds <= 15 + 5
    assert says in words
    assert not (tmp_path / "run").exists()
