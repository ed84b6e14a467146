"""Checkpoints that were damaged or forged: found before use, set aside, and the run goes on from the one before."""

from __future__ import annotations

import json
import os
import pickle
import random
import resource
import shutil
import sys
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from harness.cli import Answer, command, paceline
from harness.ranks import make_world
from harness.runs import read_results
from paceline.checkpoints.format import DamagedCheckpoint, NewerSchema, read_manifest, step_folders, verify
from paceline.checkpoints.payload import PayloadReader
from paceline.checkpoints.resume import choose_checkpoint
from paceline.checkpoints.store import adopt_best, find_newest, open_checkpoint, point
from paceline.cli.checkpoints import run as list_checkpoints
from paceline.errors import CheckpointError

FLAGS = [
    *("shapes-cnn", "--num-samples=640", "--global-batch-size=64", "--epochs=2", "--log-frequency=1", "--track"),
    *("--processes=1", "--save-steps=4", "--keep-last=4"),
]
NEWEST, BEFORE = "step-00000018", "step-00000016"
FILES = ("model.safetensors", "optimizer.safetensors", "state.json", "manifest.json")
DAMAGED = 4
MOST_CPU_S = 1.0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of 18 steps with checkpoints of its steps 9, 12, 16 and 18."""
    folder = tmp_path_factory.mktemp("undisturbed")
    answer = paceline("train", *FLAGS, "--output-dir", "run", cwd=folder)
    assert answer.code == 0, answer
    names = [path.name for path in step_folders(folder / "run" / "checkpoints")]
    assert names == [NEWEST, BEFORE, "step-00000012", "step-00000009"]
    return folder / "run"


@pytest.fixture
def run(undisturbed: Path, tmp_path: Path) -> Path:
    """A copy of that run. What no test damages is shared: hard links."""

    def copy(source: str, target: str) -> None:
        (shutil.copy2 if NEWEST in source or "checkpoints" not in source else os.link)(source, target)

    shutil.copytree(undisturbed, tmp_path / "run", symlinks=True, copy_function=copy)
    return tmp_path / "run"


# --- Accidents: every one of these is done to the newest checkpoint ---------------------------------------------------


def cut(name: str, keep: Callable[[int], int], folder: Path) -> None:
    os.truncate(folder / name, keep((folder / name).stat().st_size))


def delete(name: str, folder: Path) -> None:
    (folder / name).unlink()


def zero_the_tail(name: str, folder: Path) -> None:
    with (folder / name).open("r+b") as file:
        file.seek(-4096, os.SEEK_END)
        file.write(bytes(4096))


def flip_a_bit(name: str, where: float, bit: int, folder: Path) -> None:
    """`where`: between 0 (the first byte) and 1 (after the last)."""
    content = bytearray((folder / name).read_bytes())
    content[int(where * len(content))] ^= 1 << bit
    (folder / name).write_bytes(content)


def accidents() -> dict[str, tuple[str, Callable[[Path], None]]]:
    found: dict[str, tuple[str, Callable[[Path], None]]] = {
        "truncated to half": (FILES[0], partial(cut, FILES[0], lambda size: size // 2)),
        "last 100 bytes cut": (FILES[1], partial(cut, FILES[1], lambda size: size - 100)),
        "deleted": (FILES[1], partial(delete, FILES[1])),
        "zeroed tail": (FILES[0], partial(zero_the_tail, FILES[0])),
    }
    draw = random.Random(2026)
    for number in range(50):
        name = FILES[number % len(FILES)]
        found[f"bit {number} flipped in {name}"] = (name, partial(flip_a_bit, name, draw.random(), draw.randrange(8)))
    return found


ACCIDENTS = accidents()
assert len(ACCIDENTS) == 54


@pytest.mark.parametrize("case", ACCIDENTS)
def test_damage_is_found_and_the_one_before_is_used(
    case: str, run: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    name, damage = ACCIDENTS[case]
    newest = run / "checkpoints" / NEWEST
    original = (newest / name).read_bytes()
    damage(newest)
    assert not (newest / name).exists() or (newest / name).read_bytes() != original  # it did happen

    assert list_checkpoints([str(run), "--verify"]) == DAMAGED
    out = capsys.readouterr().out
    assert f"{NEWEST}/{name}" in out
    assert "expected" in out
    assert "got" in out

    chosen = choose_checkpoint(run, make_world(0, 1), prefer_best=False)
    assert chosen is not None
    assert (chosen.path.name, chosen.step) == (BEFORE, 16)
    (record,) = caplog.records
    assert record.message.startswith(f"warning: checkpoint {NEWEST} is damaged ({name}: expected ")
    assert ", got " in record.message
    assert record.message.endswith(f"moved to damaged-{NEWEST}")
    assert not newest.exists()
    assert (run / "checkpoints" / f"damaged-{NEWEST}").is_dir()

    assert list_checkpoints([str(run), "--verify"]) == 0  # what was set aside is told, and does not count
    assert f"set aside: damaged-{NEWEST}" in capsys.readouterr().out


def test_every_bit_of_a_manifest_counts(run: Path) -> None:
    # Most flips also break the JSON; those in a version or a hash are found by the seal alone.
    path = run / "checkpoints" / NEWEST / "manifest.json"
    original = path.read_bytes()
    with path.open("r+b") as file:
        for position, byte in enumerate(original):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), position)
                with pytest.raises(DamagedCheckpoint, match=r"manifest\.json: expected .*, got "):
                    read_manifest(path.parent)
            os.pwrite(file.fileno(), bytes([byte]), position)
    assert path.read_bytes() == original
    read_manifest(path.parent)


RESUMED = ["truncated to half", "deleted", "bit 1 flipped in optimizer.safetensors", "bit 3 flipped in manifest.json"]


@pytest.mark.parametrize("case", RESUMED)
def test_the_run_goes_on_to_the_same_end(case: str, run: Path, undisturbed: Path) -> None:
    name, damage = ACCIDENTS[case]
    (run / "results.json").unlink()
    damage(run / "checkpoints" / NEWEST)
    told = paceline("checkpoints", "run", "--verify", cwd=run.parent)
    assert told.code == DAMAGED, told
    answer = paceline("train", *FLAGS, "--resume=auto", "--output-dir=run", cwd=run.parent)
    assert answer.code == 0, answer
    assert f"checkpoint {NEWEST} is damaged ({name}: expected" in answer.out
    assert "resumed   at step 16" in answer.out
    assert read_results(run)["weights_sha256"] == read_results(undisturbed)["weights_sha256"]
    assert read_results(run)["test_loss"] == read_results(undisturbed)["test_loss"]
    assert metrics_without_time(run) == metrics_without_time(undisturbed)
    assert open_checkpoint(run / "checkpoints" / "latest").step == 18


def metrics_without_time(folder: Path) -> list[str]:
    return [line.rpartition(",")[0] for line in (folder / "metrics.csv").read_text().splitlines()]


def test_with_every_one_damaged_there_is_nothing_to_go_on_from(run: Path) -> None:
    folder = run / "checkpoints"
    for path in step_folders(folder):
        (path / "manifest.json").unlink()
    newest, reports = find_newest(folder)
    assert newest is None
    assert len(reports) == 4
    assert step_folders(folder) == []


def test_a_damaged_best_gives_way_to_the_newest(run: Path) -> None:
    folder = run / "checkpoints"
    point(folder, "best", folder / NEWEST)
    flip_a_bit("model.safetensors", 0.5, 0, folder / NEWEST)
    newest, reports = find_newest(folder, prefer_best=True)
    assert newest is not None
    assert newest.path.name == BEFORE
    assert len(reports) == 1


def test_the_best_of_a_resumed_state_is_pointed_at_again(run: Path) -> None:
    # Killed between the naming of a checkpoint and the pointing of the link, or gone back to an earlier step.
    folder = run / "checkpoints"
    for stale in (BEFORE, NEWEST):
        point(folder, "best", folder / stale)
        adopt_best(folder, folder, 9)
        assert (folder / "best").resolve().name == "step-00000009"
    adopt_best(folder, folder, 0)
    assert not (folder / "best").is_symlink()


# --- The list ---------------------------------------------------------------------------------------------------------


def test_the_list_says_what_there_is(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert list_checkpoints([str(run), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert (listed["verified"], listed["set_aside"]) == (False, [])
    entries = listed["checkpoints"]
    assert [(entry["step"], entry["epoch"]) for entry in entries] == [(9, 1.0), (12, 1.33), (16, 1.78), (18, 2.0)]
    assert [entry["is_latest"] for entry in entries] == [False, False, False, True]
    assert sum(entry["is_best"] for entry in entries) == 1
    assert all((entry["world_size"], entry["strategy"]) == (1, "single") for entry in entries)
    has_validation = [entry["validation_accuracy"] is not None for entry in entries]
    assert has_validation == [True, False, False, True]
    sizes = [
        sum((run / "checkpoints" / entry["name"] / file).stat().st_size for file in FILES[:3]) for entry in entries
    ]
    assert [entry["size_bytes"] for entry in entries] == sizes

    assert list_checkpoints([str(run / "checkpoints"), "--verify"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert " ".join(table[0].split()) == "step epoch val acc val loss size saved by marks verdict"
    assert [line.split()[-1] for line in table[1:]] == ["whole"] * 4


def test_without_verify_a_size_is_checked_and_a_bit_is_not(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip_a_bit("model.safetensors", 0.9, 0, run / "checkpoints" / NEWEST)
    assert list_checkpoints([str(run)]) == 0
    cut("model.safetensors", lambda size: size - 1, run / "checkpoints" / NEWEST)
    assert list_checkpoints([str(run)]) == DAMAGED
    assert "1 of 4 damaged" in capsys.readouterr().out


def test_the_list_needs_no_torch(run: Path, tmp_path: Path) -> None:
    probe = "import sys; from paceline.cli.main import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    answer = command(sys.executable, "-c", probe, "checkpoints", str(run), "--verify", cwd=tmp_path)
    assert answer.out.splitlines()[-1] == "0 False", answer


def test_a_run_without_checkpoints_and_what_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    empty = paceline("checkpoints", "run", cwd=tmp_path)
    assert (empty.code, empty.out) == (0, "no checkpoints in run/checkpoints\n")
    for arguments, part in [
        (["nowhere"], "not a run folder"),
        (["run", "--verfy"], "unknown flag"),
        (["run", "run"], "one run"),
    ]:
        answer = paceline("checkpoints", *arguments, cwd=tmp_path)
        assert answer.code == 2
        assert part in answer.err
    assert "usage" in paceline("checkpoints", "--help", cwd=tmp_path).out


# --- Forgers: they know the format and can seal a manifest ------------------------------------------------------------


class Canary:
    """Unpickled, it leaves a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def seal(text: bytes) -> bytes:
    """As docs/checkpoints.md describes it, written a second time."""
    return text.removesuffix(b"\n}") + b',\n "crc32": "%08x"\n}\n' % zlib.crc32(text)


def forge(folder: Path, change: Callable[[dict[str, Any]], object] = lambda body: None) -> None:
    """Give a folder the manifest that belongs to its files, then change it and seal it again."""
    body = json.loads((folder / "manifest.json").read_bytes())
    del body["crc32"]
    for name, entry in body["files"].items():
        content = (folder / name).read_bytes()
        entry.update(size_bytes=len(content), crc32=f"{zlib.crc32(content):08x}")
    change(body)
    (folder / "manifest.json").write_bytes(seal(json.dumps(body, indent=1, sort_keys=True).encode()))


def canary_as(name: str, folder: Path) -> None:
    (folder / name).write_bytes(pickle.dumps(Canary(folder.parent / "canary")))
    forge(folder)


def canary_listed_as(name: str, folder: Path) -> None:
    content = pickle.dumps(Canary(folder.parent / "canary"))
    (folder / name).write_bytes(content)
    entry = {"size_bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    forge(folder, lambda body: body["files"].update({name: entry}))


def listed_as(name: str, folder: Path) -> None:
    forge(folder, lambda body: body["files"].update({name: body["files"].pop("model.safetensors")}))


def linked_payload(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder.parent / "outside")
    (folder / "model.safetensors").symlink_to(folder.parent / "outside")


def linked_state(folder: Path) -> None:
    (folder / "state.json").rename(folder.parent / "outside")
    (folder / "state.json").symlink_to(folder.parent / "outside")


def ten_gigabytes_claimed(folder: Path) -> None:
    forge(folder, lambda body: body["files"]["model.safetensors"].update(size_bytes=10 * 10**9))


def ten_gigabytes_of_holes(folder: Path) -> None:
    ten_gigabytes_claimed(folder)
    os.truncate(folder / "model.safetensors", 10 * 10**9)


def header_that_claims_gigabytes(folder: Path) -> None:
    header = {"w": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 2**82]}}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    forge(folder)


def deep(depth: int = 200_000) -> bytes:
    return b"[" * depth + b"]" * depth


def deep_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_bytes(seal(b'{\n "about": ' + deep() + b"\n}"))


def deep_state(folder: Path) -> None:
    (folder / "state.json").write_bytes(b'{"step": 18, "config": ' + deep() + b"}")
    forge(folder)


def huge_manifest(folder: Path) -> None:
    os.truncate(folder / "manifest.json", 100 * 10**6)


def manifest_without_an_end(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    os.mkfifo(folder / "manifest.json")


def folder_as_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").mkdir()


def newer_schema(folder: Path) -> None:
    forge(folder, lambda body: body.update(schema=2))


def no_about(folder: Path) -> None:
    forge(folder, lambda body: body.pop("about"))


def infinite_step(folder: Path) -> None:
    (folder / "state.json").write_text('{"step": Infinity}')
    forge(folder)


FORGERIES: dict[str, tuple[Callable[[Path], None], str]] = {
    "pickle as model": (partial(canary_as, "model.safetensors"), "model.safetensors"),
    "pickle as state": (partial(canary_as, "state.json"), "state.json"),
    "pickle listed as .metadata": (partial(canary_listed_as, ".metadata"), "'.metadata'"),
    "pickle listed as optimizer.pt": (partial(canary_listed_as, "optimizer.pt"), "'optimizer.pt'"),
    "name that climbs": (partial(listed_as, "../model.safetensors"), "'../model.safetensors'"),
    "name that begins at the root": (partial(listed_as, "/etc/passwd"), "'/etc/passwd'"),
    "linked payload": (linked_payload, "a link or folder"),
    "linked state": (linked_state, "a link or folder"),
    "10 GB claimed": (ten_gigabytes_claimed, "10,000,000,000 bytes"),
    "10 GB of holes": (ten_gigabytes_of_holes, "model.safetensors"),
    "header that claims gigabytes": (header_that_claims_gigabytes, "model.safetensors"),
    "deep manifest": (deep_manifest, "manifest.json"),
    "deep state": (deep_state, "state.json"),
    "manifest of 100 MB": (huge_manifest, "100,000,000"),
    "manifest without an end": (manifest_without_an_end, "manifest.json"),
    "folder as manifest": (folder_as_manifest, "manifest.json"),
    "newer schema": (newer_schema, "schema 2"),
    "no origin": (no_about, "manifest.json"),
    "infinite step": (infinite_step, "state.json"),
}


def everything_below(folder: Path) -> dict[str, tuple[int, int]]:
    found = {path: path.lstat() for path in sorted(folder.rglob("*"))}
    return {str(path.relative_to(folder)): (state.st_mode, state.st_size) for path, state in found.items()}


def paceline_with_cpu_time(*arguments: str, cwd: Path) -> tuple[Answer, float]:
    """User and system time, not the clock's: other tests may keep the machine busy."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    answer = paceline(*arguments, cwd=cwd, timeout_s=30)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return answer, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize("case", FORGERIES)
def test_a_forged_checkpoint_is_refused_at_once(case: str, undisturbed: Path, tmp_path: Path) -> None:
    spoil, part = FORGERIES[case]
    shutil.copytree(undisturbed / "checkpoints" / NEWEST, tmp_path / "forged")
    spoil(tmp_path / "forged")
    before = everything_below(tmp_path)
    flags = ["--resume=forged", "--output-dir=out"]
    answer, cpu_s = paceline_with_cpu_time("train", *FLAGS, *flags, cwd=tmp_path)
    assert answer.code == DAMAGED, answer
    assert part in answer.err
    assert answer.err.startswith("error: the checkpoint ")
    assert "Traceback" not in answer.err
    assert cpu_s < MOST_CPU_S
    assert not (tmp_path / "canary").exists()
    assert everything_below(tmp_path) == before  # nothing written, in or out


@pytest.mark.parametrize("case", FORGERIES)
def test_a_forged_newest_is_passed_over(case: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run / "checkpoints"
    FORGERIES[case][0](folder / NEWEST)
    assert list_checkpoints([str(run)]) == DAMAGED
    assert list_checkpoints([str(run), "--json"]) == DAMAGED
    capsys.readouterr()
    if case == "newer schema":  # whole, and perhaps the work of a week: not ours to move aside
        with pytest.raises(CheckpointError, match="newer Paceline"):
            find_newest(folder)
        assert (folder / NEWEST).is_dir()
    else:
        newest, reports = find_newest(folder)
        assert newest is not None
        assert (newest.path.name, len(reports)) == (BEFORE, 1)
    assert not (folder / "canary").exists()


@pytest.mark.parametrize(
    "places",
    [
        '{"w": {"offset": [0], "whole_shape": [1000000000000]}}',
        '{"w": {"offset": [-4], "whole_shape": [4]}}',
        '{"w": {"offset": [0, 0], "whole_shape": [4]}}',
        '{"w": 7}',
        "not JSON",
        "[" * 100_000,
    ],
)
def test_slices_that_lie_about_their_place_are_refused(places: str, tmp_path: Path) -> None:
    save_file({"w": torch.zeros(4)}, tmp_path / "model.safetensors", {"paceline_slices": places})
    with pytest.raises(CheckpointError):
        PayloadReader(tmp_path, ["model.safetensors"]).read("w")


def test_the_canary_sings(tmp_path: Path) -> None:
    # Else its silence would show nothing.
    pickle.loads(pickle.dumps(Canary(tmp_path / "canary")))
    assert (tmp_path / "canary").exists()


def test_a_forged_seal_without_changes_is_accepted(run: Path) -> None:
    # Else every forgery above might be refused for its seal alone.
    newest = run / "checkpoints" / NEWEST
    original = (newest / "manifest.json").read_bytes()
    forge(newest)
    assert (newest / "manifest.json").read_bytes() == original
    forge(newest, lambda body: body["about"].update(strategy="forged"))
    assert verify(newest).about["strategy"] == "forged"
    newer_schema(newest)
    with pytest.raises(NewerSchema):
        read_manifest(newest)


def test_pickles_beside_a_checkpoint_are_never_opened(run: Path) -> None:
    newest = run / "checkpoints" / NEWEST
    for name in (".metadata", "optimizer.pt", "model.pkl"):
        (newest / name).write_bytes(pickle.dumps(Canary(run.parent / "canary")))
    flags = ["--resume=run/checkpoints/latest", "--output-dir=out"]
    answer = paceline("train", *FLAGS, *flags, cwd=run.parent)
    assert answer.code == 0, answer
    assert "resumed   at step 18" in answer.out
    assert not (run.parent / "canary").exists()


def test_a_best_link_that_leads_outside_is_not_followed(run: Path, tmp_path: Path) -> None:
    folder = run / "checkpoints"
    outside = tmp_path / "step-00000099"
    outside.mkdir()
    (folder / "best").unlink()
    (folder / "best").symlink_to("../../step-00000099")
    newest, reports = find_newest(folder, prefer_best=True)
    assert newest is not None
    assert (newest.path.name, reports) == (NEWEST, [])
    assert outside.is_dir()  # not renamed as damaged
