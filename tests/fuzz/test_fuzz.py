"""Files and messages from other users: for any bytes, only our own errors appear, and nothing else happens.

`make test-long` gives a few mutations of each format to all its readers. `make test-fuzz` gives each of a
thousand mutations (FUZZ_CASES sets the number) to one of them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fuzz.mutations import OUTSIDE, mutate_json
from fuzz.samples import make_samples
from fuzz.sandbox import Finding, Format, Reader, run_cases
from fuzz.table import FORMATS

SEED = 20261116
QUICK_CASES = 15
ALL_CASES = int(os.environ.get("FUZZ_CASES", "1000"))


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("samples")
    make_samples(root)
    return root


@pytest.fixture(scope="module")
def server() -> Any:
    """Forks children with all imports, so that a child per format is fast."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fuzz.table", "torch"])
    return context


@pytest.fixture
def work() -> Iterator[Path]:
    """In memory if possible: thousands of cases are written, and some readers call fsync."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder) / "work"


def _fuzz(
    server: Any, form: Format, samples: Path, work: Path, cases: range, limit_s: float, *, by_all_readers: bool = True
) -> list[Finding]:
    """Run in a separate process. A crash of it is also a finding."""
    receiver, sender = server.Pipe(duplex=False)
    child = server.Process(target=_child, args=(form.name, samples, work, cases, by_all_readers, sender))
    child.start()
    sender.close()
    child.join(limit_s)
    is_late = child.is_alive()
    if is_late:
        child.kill()
        child.join()
    try:
        findings: list[Finding] = receiver.recv()
    except EOFError:
        why = "did not end" if is_late else f"exit code {child.exitcode}"
        return [Finding(form.name, "the process", -1, why, f"files in {work}")]
    return findings


def _child(name: str, samples: Path, work: Path, cases: range, by_all_readers: bool, sender: Any) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    form = _find(name)
    sender.send(run_cases(form, samples, work, seed=SEED, cases=cases, by_all_readers=by_all_readers))


def _find(name: str) -> Format:
    return next(form for form in (*FORMATS, *INJECTED) if form.name == name)


@pytest.mark.timeout(400)
@pytest.mark.long
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_only_our_own_errors_appear(form: Format, samples: Path, server: Any, work: Path) -> None:
    """A few mutations of every format, by all of its readers."""
    findings = _fuzz(server, form, samples, work, range(QUICK_CASES), 350.0)
    assert not findings, "\n".join(map(str, findings))


@pytest.mark.fuzz
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_only_our_own_errors_appear_in_many(form: Format, samples: Path, server: Any, work: Path) -> None:
    """Many mutations of every format, in `make test-fuzz`. FUZZ_CASES sets the number."""
    findings = _fuzz(server, form, samples, work, range(ALL_CASES), 7000.0, by_all_readers=False)
    assert not findings, "\n".join(map(str, findings))


# --- The fuzzer itself ------------------------------------------------------------------------------------------------


def _build_injected(samples: Path, folder: Path) -> None:
    (folder / "value.json").write_text('{"value": 1, "name": "x"}')


def _injected(name: str, read: Any, **more: Any) -> Format:
    return Format(f"injected/{name}", _build_injected, "value.json", mutate_json, (Reader("injected", read),), **more)


def _is_valid(folder: Path) -> bool:
    return (folder / "value.json").read_text() == '{"value": 1, "name": "x"}'


def _read_key(folder: Path) -> None:
    try:
        content = json.loads((folder / "value.json").read_bytes())
    except (ValueError, RecursionError):
        return
    if isinstance(content, dict):
        str(content["value"])


def _wait(folder: Path) -> None:
    if not _is_valid(folder):
        while True:
            pass


def _allocate(folder: Path) -> None:
    if not _is_valid(folder):
        len(bytearray(1 << 33))


def _leave(folder: Path) -> None:
    if not _is_valid(folder):
        try:
            (folder.parent / OUTSIDE).read_text()
        except BaseException:  # a reader that catches it is also detected
            return


def _write_outside(folder: Path) -> None:
    if not _is_valid(folder):
        (folder.parent / "new.txt").write_text("x")


def _execute(folder: Path) -> None:
    if not _is_valid(folder):
        os.system("true")


def _crash(folder: Path) -> None:
    if not _is_valid(folder):
        os.abort()


INJECTED = (
    _injected("KeyError", _read_key),
    _injected("it takes too long", _wait),
    _injected("MemoryError", _allocate),
    _injected("reads", _leave),
    _injected("writes", _write_outside),
    _injected("executes", _execute),
    _injected("exit code", _crash),
)


@pytest.mark.parametrize("form", INJECTED, ids=lambda form: form.name)
def test_a_reader_that_violates_a_rule_is_detected(form: Format, samples: Path, server: Any, work: Path) -> None:
    """The fuzzer can fail: it detects wrong errors, hangs, memory use, foreign files, programs and crashes."""
    findings = _fuzz(server, form, samples, work, range(20), 100.0)
    kinds = {finding.kind for finding in findings}
    assert any(kind.startswith(form.name.partition("/")[2]) for kind in kinds), findings


def test_mutations_depend_only_on_the_seed() -> None:
    """A finding can be reproduced: format, seed and number of the case give the same bytes."""
    from random import Random

    valid = b'{"a": [1, 2, {"b": "c"}], "d": 1.5}'
    first, again = ([mutate_json(valid, Random(f"x:{n}")) for n in range(300)] for _ in range(2))
    assert first == again
    assert len(set(first)) > 200, "most mutations differ from each other"
