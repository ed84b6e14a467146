"""The end of the fork server."""

from __future__ import annotations

import sys
from pathlib import Path

from harness.cli import command
from harness.processes import seconds_until_empty

# In a separate process, like the server. The rank is removed from the list, as if its start was interrupted.
INTERRUPTED_START = """
import multiprocessing, os, signal
from multiprocessing import forkserver, process
from paceline.launch.rank_processes import end_fork_server

end_fork_server()  # there is none yet
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload([])
rank = context.Process(target=signal.pause)
rank.start()
process._children.discard(rank)
assert multiprocessing.active_children() == []
end_fork_server()
server = forkserver._forkserver._forkserver_pid
assert os.waitstatus_to_exitcode(os.waitpid(server, 0)[1]) == -signal.SIGKILL
end_fork_server()  # it is gone already
"""


def test_ending_the_fork_server_kills_unregistered_ranks(tmp_path: Path) -> None:
    answer = command(sys.executable, "-c", INTERRUPTED_START, cwd=tmp_path, timeout_s=20)
    assert (answer.code, answer.err) == (0, "")
    seconds_until_empty(tmp_path, limit_s=10)
