"""A real S3 server (moto) with injected faults: errors, truncated uploads, delayed answers, an unreachable store."""

from __future__ import annotations

import io
import logging
import re
import socket
import threading
import urllib.request
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

Environ = dict[str, Any]
_ERROR = b"<Error><Code>InternalError</Code><Message>We encountered an internal error.</Message></Error>"
_CHECKSUM_HEADERS = ("HTTP_X_AMZ_CHECKSUM", "HTTP_X_AMZ_SDK_CHECKSUM", "HTTP_X_AMZ_CONTENT_SHA256", "HTTP_CONTENT_MD5")


@dataclass
class Fault:
    """Affects requests whose "METHOD /path" matches the pattern, this number of times."""

    kind: str  # error, cut, hold, gone
    pattern: str
    times: int = 1
    after: str = ""  # only after the first request that matches this
    fired: list[str] = field(default_factory=list)
    is_reached: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)


class FaultyS3:
    """One bucket per test. `requests` has all requests in order."""

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self._application = application
        self._faults: list[Fault] = []
        self._lock = threading.Lock()
        self.requests: list[str] = []
        self.port = 0

    def environment(self) -> dict[str, str]:
        """Environment variables that point a client to this server."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def make_bucket(self, name: str) -> str:
        self._call("PUT", name)
        return name

    @contextmanager
    def failing(self, *faults: Fault) -> Iterator[None]:
        self._faults = list(faults)
        try:
            yield
        finally:
            self._faults = []
            for fault in faults:
                fault.release.set()

    def read(self, bucket: str, name: str) -> bytes:
        return self._call("GET", f"{bucket}/{name}")

    def write(self, bucket: str, name: str, content: bytes) -> None:
        self._call("PUT", f"{bucket}/{name}", content)

    def names(self, bucket: str) -> list[str]:
        listing = ElementTree.fromstring(self._call("GET", f"{bucket}?list-type=2"))
        return sorted(str(entry.text) for entry in listing.iter() if entry.tag.endswith("}Key"))

    def _call(self, method: str, path: str, content: bytes | None = None) -> bytes:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/{path}", data=content, method=method)
        request.add_header("X-Test", "not a client's")
        request.add_header("Content-Type", "application/octet-stream")  # else moto parses bytes as a form
        request.add_header("Authorization", "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request")
        with urllib.request.urlopen(request, timeout=10) as answer:
            return bytes(answer.read())

    def __call__(self, environ: Environ, start_response: Callable[..., Any]) -> Iterable[bytes]:
        request = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}"
        if "HTTP_X_TEST" in environ:
            return self._application(environ, start_response)
        fault = self._next_fault(request)
        if fault is None:
            return self._application(environ, start_response)
        fault.is_reached.set()
        if fault.kind == "error":
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response("500 Internal Server Error", [("Content-Type", "application/xml")])
            return [_ERROR]
        if fault.kind == "gone":
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionError("gone")
        if fault.kind == "hold":
            fault.release.wait(60)
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            raise ConnectionError("held until its sender was killed")
        return self._application(_cut(environ), start_response)

    def _next_fault(self, request: str) -> Fault | None:
        with self._lock:
            self.requests.append(request)
            for fault in self._faults:
                if fault.after:
                    if re.search(fault.after, request):
                        fault.after = ""
                    continue
                if len(fault.fired) < fault.times and re.search(fault.pattern, request):
                    fault.fired.append(request)
                    return fault
        return None


def _cut(environ: Environ) -> Environ:
    """Truncate an upload so that the store accepts it as complete."""
    body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
    half = body[: len(body) // 2]
    kept = {name: value for name, value in environ.items() if not name.startswith(_CHECKSUM_HEADERS)}
    return {**kept, "wsgi.input": io.BytesIO(half), "CONTENT_LENGTH": str(len(half))}


@contextmanager
def faulty_s3() -> Iterator[FaultyS3]:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)
    store = FaultyS3(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, store, threaded=True)  # type: ignore[arg-type]
    server.daemon_threads = True  # type: ignore[attr-defined]
    store.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
