"""The end of the server that forks ranks."""

from __future__ import annotations

import sys
from pathlib import Path

from harness.cli import command
from harness.processes import seconds_until_empty

# In a process of its own, as the server is. The rank is taken off the list, as if its birth had been broken off.
BROKEN_OFF = """
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


def test_it_takes_ranks_along_that_are_in_nobodys_list(tmp_path: Path) -> None:
    answer = command(sys.executable, "-c", BROKEN_OFF, cwd=tmp_path, timeout_s=20)
    assert (answer.code, answer.err) == (0, "")
    seconds_until_empty(tmp_path, limit_s=10)
