"""Downloads: complete and verified or absent, once per machine, with an explanation if they fail."""

from __future__ import annotations

import hashlib
import http.server
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.data.fetch import fetch_file, locked
from paceline.errors import DataError

BODY = b"pixels" * 1000
SHA256 = hashlib.sha256(BODY).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    hits = 0

    def do_GET(self) -> None:
        type(self).hits += 1
        if self.path == "/absent":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        self.wfile.write(BODY[:100] if self.path == "/short" else BODY)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    Handler.hits = 0
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_port}"
        httpd.shutdown()
        thread.join()


def visible(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if not p.name.endswith(".lock"))


def test_downloads_and_verifies(server: str, tmp_path: Path) -> None:
    target = tmp_path / "deep" / "file.bin"
    got = fetch_file(f"{server}/file", target, checksum=SHA256, algorithm="sha256", what="a file")
    assert got == target
    assert target.read_bytes() == BODY
    assert visible(target.parent) == ["file.bin"]
    assert target.stat().st_mode & 0o777 == 0o644


def test_a_prefix_of_the_digest_is_enough(server: str, tmp_path: Path) -> None:
    fetch_file(f"{server}/x", tmp_path / "x", checksum=SHA256[:8].upper(), algorithm="sha256", what="weights")
    assert (tmp_path / "x").exists()


def test_an_existing_file_is_not_fetched(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_bytes(b"mine")
    fetch_file("http://nowhere.invalid/", target, checksum="00", algorithm="md5", what="a file")
    assert target.read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("path", "checksum", "reason"),
    [
        ("/absent", SHA256, "HTTP 404"),
        ("/short", SHA256, "100 of 6000"),
        ("/file", "ab" * 32, "expected abab"),
    ],
)
def test_a_failure_leaves_no_file_and_names_a_remedy(
    server: str, tmp_path: Path, path: str, checksum: str, reason: str
) -> None:
    with pytest.raises(DataError) as caught:
        fetch_file(server + path, tmp_path / "f", checksum=checksum, algorithm="sha256", what="the thing")
    screen = caught.value.screen()
    assert "could not download the thing" in screen
    assert reason in screen
    assert server + path in screen
    assert str(tmp_path / "f") in screen
    assert visible(tmp_path) == []


def test_a_refused_connection_is_explained(server: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="could not download"):
        fetch_file("http://127.0.0.1:1/", tmp_path / "f", checksum="00", algorithm="md5", what="it")


def test_a_folder_that_cannot_be_written_is_explained(server: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DataError, match="could not download"):
        fetch_file(f"{server}/f", tmp_path / "file" / "f", checksum=SHA256, algorithm="sha256", what="it")


def test_several_processes_download_once(server: str, tmp_path: Path) -> None:
    def fetch(_: int) -> Path:
        return fetch_file(f"{server}/f", tmp_path / "f", checksum=SHA256, algorithm="sha256", what="it")

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(fetch, range(8))) == {tmp_path / "f"}
    assert Handler.hits == 1


def test_the_lock_excludes(tmp_path: Path) -> None:
    inside: list[int] = []

    def enter(number: int) -> None:
        with locked(tmp_path / "f"):
            inside.append(number)
            assert inside == [number]
            inside.remove(number)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(enter, range(50)))
