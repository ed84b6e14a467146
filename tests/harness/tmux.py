"""A real terminal: a shell in a tmux window. Tests send keys, resize it and read the screen."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from harness.cli import environment
from harness.processes import kill_all_in

TMUX = shutil.which("tmux")
PROMPT = "ready> "
_POLL_S = 0.05
_NOT_FOR_TESTS = ("CI", "NO_COLOR", "COLUMNS", "LINES", "PACELINE_OUTPUT")


class Terminal:
    """One window with its own tmux server, separate from the user's."""

    def __init__(self, home: Path, columns: int, rows: int, variables: dict[str, str]) -> None:
        self._home = home
        self._socket = str(home / "tmux")
        clean = {name: value for name, value in environment().items() if name not in _NOT_FOR_TESTS}
        surroundings = {
            **clean,
            **{"PATH": f"{home / 'bin'}:/usr/bin:/bin", "HOME": str(home), "TERM": "screen-256color"},
            **{"LANG": "C.UTF-8", "LC_ALL": "C.UTF-8", **variables},
        }
        self._environment = {name: value for name, value in surroundings.items() if name != "TMUX"}
        # Set the variables again: tmux sets TERM itself, and the outer shell drops the prompt.
        given = " ".join(shlex.quote(f"{name}={value}") for name, value in {"PS1": PROMPT, **variables}.items())
        shell = f"exec env {given} bash --norc --noprofile"
        self._tmux("new-session", "-d", "-x", str(columns), "-y", str(rows), shell)
        try:
            self.wait_for(PROMPT.strip(), 20)
        except BaseException:
            self.close()
            raise

    def type(self, text: str, *, enter: bool = True) -> None:
        self._tmux("send-keys", "-l", text)
        if enter:
            self._tmux("send-keys", "Enter")

    def press(self, key: str) -> None:
        """Send a key by its tmux name: C-c, Tab."""
        self._tmux("send-keys", key)

    def resize(self, columns: int, rows: int = 45) -> None:
        self._tmux("resize-window", "-x", str(columns), "-y", str(rows))

    def screen(self, *, colours: bool = False) -> str:
        """The text of the window and its scrollback."""
        text = self._tmux("capture-pane", "-p", "-S", "-200", *(["-e"] if colours else []))
        return "\n".join(line.rstrip() for line in text.splitlines()).rstrip("\n")

    def lines(self) -> list[str]:
        return self.screen().splitlines()

    def wait_for(self, seen: str | Callable[[str], object], timeout_s: float = 60) -> str:
        """Wait until the screen matches a pattern or a condition. Returns the screen."""
        is_there = seen if callable(seen) else re.compile(seen, re.MULTILINE).search
        deadline = time.monotonic() + timeout_s
        while not is_there(screen := self.screen()):
            assert time.monotonic() < deadline, f"not seen: {seen}\n{screen}"
            time.sleep(_POLL_S)
        return screen

    def wait_for_prompt(self, timeout_s: float = 90) -> str:
        """Wait until the command has ended: the last line is only the prompt."""
        return self.wait_for(rf"\n{PROMPT.strip()}\Z", timeout_s)

    def cursor(self) -> tuple[int, bool]:
        """The cursor's column, and whether it is visible."""
        column, flag = self._tmux("display-message", "-p", "#{cursor_x} #{cursor_flag}").split()
        return int(column), flag == "1"

    def close(self) -> None:
        self._tmux("kill-server")
        kill_all_in(self._home)

    def _tmux(self, *arguments: str) -> str:
        assert TMUX is not None, "tmux is not installed"
        done = subprocess.run(
            [TMUX, "-S", self._socket, "-f", os.devnull, *arguments],
            cwd=self._home,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
        return done.stdout
