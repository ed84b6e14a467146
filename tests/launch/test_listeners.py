"""A run on one machine has no listener that another machine can reach."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from harness.cli import command
from harness.processes import processes_in, started
from harness.short_run import FLAGS
from harness.sockets import beyond_loopback, listening_addresses

ENDLESS = [*FLAGS, "--epochs=100000"]


def test_a_run_on_one_machine_listens_on_loopback_only(tmp_path: Path) -> None:
    """SECURITY.md: on one machine nothing listens beyond loopback, neither the store nor gloo."""
    with started(*ENDLESS, cwd=tmp_path) as run:
        run.wait_for("step 2/")  # all listeners of the run are open now
        assert len(run.ranks()) == 2
        addresses = listening_addresses(processes_in(tmp_path))
    assert len(addresses) >= 2  # the store, and gloo's
    assert beyond_loopback(addresses) == []


@pytest.mark.parametrize(
    "command_line",
    [("bench", "--processes=2", "--what=collectives", "--seconds-per-size=0.05"), ("doctor", "--processes=2")],
)
@pytest.mark.long
def test_ranks_of_other_commands_listen_on_loopback_only(command_line: tuple[str, ...], tmp_path: Path) -> None:
    """SECURITY.md: the same for the ranks of bench and doctor, checked from start to end."""
    seen: set[tuple[str, int]] = set()
    with started(*command_line, cwd=tmp_path) as run:
        while run.process.poll() is None:
            seen.update(listening_addresses(run.ranks()))
    assert seen  # the store, and gloo's
    assert beyond_loopback(seen) == []


# An attacker on this machine writes a pickle that creates a file, under the keys of torch's dynamic rendezvous.
ATTACK = """
import base64, os, pickle, sys, threading
from datetime import timedelta
import torch.distributed as dist

class Payload:
    def __reduce__(self):
        return open, (sys.argv[1], "x")

value = base64.b64encode(pickle.dumps(Payload()))
written = []

def attack(place):
    host, _, port = place.rpartition(":")
    store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))
    for key in ("torch.rendezvous.paceline-1", "/torch.rendezvous.paceline-1"):
        store.set(key, value)
        written.append(key)

# In threads: gloo's listeners are no stores and never answer.
threads = [threading.Thread(target=attack, args=(place,), daemon=True) for place in sys.argv[2:]]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join(3)
print(len(written), flush=True)
os._exit(0)
"""


def test_a_value_in_the_store_is_never_unpickled(tmp_path: Path) -> None:
    """SECURITY.md: no data from a socket is executed."""
    run_dir, executed = tmp_path / "here", tmp_path / "executed"
    run_dir.mkdir()
    with started(*ENDLESS, cwd=run_dir) as run:
        run.wait_for("step 2/")
        reachable = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}
        places = [(reachable.get(host, host), port) for host, port in listening_addresses(processes_in(run_dir))]
        attack = command(
            *(sys.executable, "-c", ATTACK, str(executed)),
            *(f"{host}:{port}" for host, port in places),
            cwd=tmp_path,
            TORCH_CPP_LOG_LEVEL="FATAL",
        )
        assert attack.code == 0, attack
        assert int(attack.out) > 0  # the users of this machine can reach the store of a run on one machine
        os.kill(run.process.pid, signal.SIGTERM)  # a launcher reads the key before the run ends
        assert run.wait() == 75, run.err
    assert not executed.exists()
