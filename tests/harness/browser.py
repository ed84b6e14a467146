"""A real headless Chromium, controlled through its debugging pipe: no driver, no port, no package."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--disable-sync", "--no-first-run", "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe"),
]
_DEADLINE_S = 30


class Browser:
    """One Chromium process with any number of pages."""

    def __enter__(self) -> Browser:
        assert CHROMIUM, "no chromium on this machine: tests/harness/install-browser"
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        (commands_end, self._write), (self._read, answers_end) = _high_pipe(), _high_pipe()
        # Chromium reads commands from descriptor 3 and writes to descriptor 4.
        command = ["bash", "-c", f'exec "$@" 3<&{commands_end} 4>&{answers_end}', "chromium", CHROMIUM, *_FLAGS]
        self._process = subprocess.Popen(
            [*command, f"--user-data-dir={self._profile}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(commands_end, answers_end),
        )
        os.close(commands_end)
        os.close(answers_end)
        self._bytes = b""
        self._number = 0
        self._pages: dict[str, Page] = {}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with suppress(AssertionError, OSError, subprocess.TimeoutExpired):
            self.call("Browser.close")
            self._process.wait(timeout=5)
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self._profile, ignore_errors=True)

    def open_page(self, path: Path, *, width: int = 1200, height: int = 900, dark: bool = False) -> Page:
        """Open a file as a page, and wait until it is drawn."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session, target)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        page.resize(width, height)
        page.emulate(dark=dark)
        page.call("Page.navigate", url=path.resolve().as_uri())
        self.wait_until(lambda: page.is_loaded)
        return page

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer. Events that arrive meanwhile are passed to the pages."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def wait_until(self, is_so: Any) -> None:
        while not is_so():
            self._next()

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + _DEADLINE_S
        while b"\0" not in self._bytes:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "Chromium does not answer"
            chunk = os.read(self._read, 1 << 20)
            assert chunk, f"Chromium has ended ({self._process.poll()})"
            self._bytes += chunk
        line, _, self._bytes = self._bytes.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        page = self._pages.get(message.get("sessionId", ""))
        if page is not None and "method" in message:
            page.hear(message["method"], message["params"])
        return message


def _high_pipe() -> tuple[int, int]:
    """A pipe with both descriptors above 9, so that dup2 to 3 or 4 cannot overwrite the other end."""
    low = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in low]
    for end in low:
        os.close(end)
    return high[0], high[1]


@dataclass
class Page:
    """A page with its requests and its error messages."""

    browser: Browser
    session: str
    target: str
    is_loaded: bool = False
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)  # the first is the page itself

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **parameters)

    def hear(self, event: str, details: dict[str, Any]) -> None:
        self.is_loaded |= event == "Page.loadEventFired"
        if event == "Network.requestWillBeSent" and not details["request"]["url"].startswith("data:"):
            self.requests.append(details["request"]["url"])
        if event == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(details["exceptionDetails"].get("exception", details["exceptionDetails"])))
        if event == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(details["args"]))
        if event == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning"):
            self.errors.append(details["entry"]["text"])

    def evaluate(self, script: str) -> Any:
        """Evaluate an expression in the page. Waits for a promise."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def settle(self) -> None:
        """Wait until the page has drawn all changes."""
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done())))")

    def resize(self, width: int, height: int = 900) -> None:
        """Set the size. A narrow page is a phone, with touch and a high-resolution screen."""
        scale, is_phone = (2, True) if width < 600 else (1, False)
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=is_phone
        )
        self.settle()

    def emulate(self, *, dark: bool = False, media: str = "screen") -> None:
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)
        self.settle()

    def mouse(self, *places: tuple[float, float], press: bool = False) -> None:
        """Move the pointer through these points, optionally with a pressed button."""
        for number, (x, y) in enumerate(places):
            held = {"button": "left", "buttons": 1} if press and number else {}
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y, **held)
            if press and number == 0:
                self.call("Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, button="left", clickCount=1)
        if press:
            self.call("Input.dispatchMouseEvent", type="mouseReleased", x=x, y=y, button="left", clickCount=1)

    def click(self, selector: str) -> None:
        """Click on the middle of an element, after scrolling to it."""
        self.mouse(self.middle_of(selector), press=True)
        self.settle()

    def middle_of(self, selector: str) -> tuple[float, float]:
        node = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{node}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        edges = self.evaluate(f"(e => [e.x, e.y, e.width, e.height])({node}.getBoundingClientRect())")
        return edges[0] + edges[2] / 2, edges[1] + edges[3] / 2

    def key(self, name: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    def pdf(self, path: Path) -> Path:
        path.write_bytes(base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"]))
        return path

    def close(self) -> None:
        self.browser.call("Target.closeTarget", targetId=self.target)
