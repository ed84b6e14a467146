"""Before training on several nodes, every node reads a token of rank 0: real gloo ranks, one per "node"."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from harness.ranks import run_ranks
from paceline.errors import EXIT_USER, EndsWithPrimary, UserError
from paceline.runs.folder import RunFolder
from paceline.runs.place import RunPlace
from paceline.runs.shared_token import NODE_LOCAL, find_token, not_shared, remove_token, write_token
from paceline.runtime.detect import RankEnvironment, World
from paceline.training.same_ranks import require_shared_folder


def look(world: World, folders: list[str], resume_from: str, local_ranks: int, is_local: bool) -> dict[str, object]:
    """One rank of a node that starts in its own folder. Returns its error."""
    os.chdir(folders[world.rank])
    if is_local and world.rank:
        os.environ[NODE_LOCAL] = "1"
    local_rank = world.rank % local_ranks
    world = replace(world, host=f"n{1 + world.rank // local_ranks}", local_rank=local_rank)
    there = RankEnvironment(world.rank, world.world_size, local_rank, local_ranks, "torchrun")
    place = RunPlace(Path("run"), Path(resume_from) if resume_from else None)
    RunFolder(place.folder).create()
    try:
        require_shared_folder(place, world, there)
    except UserError as error:
        return {"code": error.exit_code, **vars(error)}
    except EndsWithPrimary as end:
        return {"code": end.code}
    return {}


def nodes_in(*folders: Path, resume_from: str = "", local_ranks: int = 1, is_local: bool = False) -> list[dict]:  # type: ignore[type-arg]
    for folder in folders:
        folder.mkdir(exist_ok=True)
    return run_ranks(len(folders), look, [str(folder) for folder in folders], resume_from, local_ranks, is_local)


def left_in(*folders: Path) -> list[Path]:
    return [path for folder in folders for path in folder.rglob(".shared-*")]


def test_a_shared_folder_passes_and_keeps_no_token(tmp_path: Path) -> None:
    """No file is left in the run folder or among its checkpoints."""
    assert nodes_in(tmp_path, tmp_path) == [{}, {}]
    assert left_in(tmp_path) == []


def test_the_node_without_the_folder_is_named_by_both_nodes(tmp_path: Path) -> None:
    """Rank 0 and the node itself name the node, the folder and a remedy. Other ranks end without a message."""
    one, other = tmp_path / "one", tmp_path / "other"
    answers = nodes_in(one, one, other, other, local_ranks=2)
    assert [answer["code"] for answer in answers] == [EXIT_USER] * 4
    for answer in (answers[0], answers[2]):
        assert (answer["what"], answer["where"]) == (
            "node n2 does not see the folder of node n1",
            str(one / "run"),
        )
        assert answer["got"] == f"n2: another folder of this name, {other / 'run'}"
        assert "--output-dir" in answer["hint"]
    assert [set(answer) for answer in (answers[1], answers[3])] == [{"code"}, {"code"}]
    assert left_in(one, other) == []


def test_checkpoints_on_a_separate_disk_of_each_node_are_detected(tmp_path: Path) -> None:
    """The run folder is shared, but its `checkpoints` links to another disk, which is not shared."""
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "checkpoints").symlink_to("/proc/self/cwd/disk")
    nodes = [tmp_path / "one", tmp_path / "other"]
    for node in nodes:
        (node / "disk").mkdir(parents=True)
        (node / "run").symlink_to(shared)
    answers = nodes_in(*nodes)
    assert [answer["code"] for answer in answers] == [EXIT_USER] * 2
    assert answers[0]["where"] == str(nodes[0] / "run" / "checkpoints")


def test_the_checkpoint_to_resume_from_must_be_on_every_node(tmp_path: Path) -> None:
    """The run folder is shared, the run of --resume is not."""
    nodes, shared = [tmp_path / "one", tmp_path / "other"], tmp_path / "shared"
    shared.mkdir()
    for node in nodes:
        node.mkdir()
        (node / "run").symlink_to(shared)
    assert nodes_in(*nodes, resume_from="before")[0]["code"] == EXIT_USER
    for node in nodes:
        (node / "before" / "checkpoints" / "step-00000001").mkdir(parents=True)
    assert nodes_in(*nodes, resume_from="before") == [{}, {}]


def test_a_node_that_fetches_its_checkpoints_needs_no_shared_folder(tmp_path: Path) -> None:
    """As in a Metaflow gang, where every node fetches from the datastore."""
    assert nodes_in(tmp_path / "one", tmp_path / "other", is_local=True) == [{}, {}]


def test_ranks_of_one_node_skip_the_check(tmp_path: Path) -> None:
    """One node shares nothing."""
    assert nodes_in(tmp_path / "one", tmp_path / "other", local_ranks=2) == [{}, {}]


def test_a_token_counts_only_with_its_contents(tmp_path: Path) -> None:
    """A file system may show a name before its bytes."""
    name = write_token(tmp_path)
    assert find_token(tmp_path, name, 0) == ""
    (tmp_path / name).write_text("")
    assert find_token(tmp_path, name, 0) != ""
    remove_token(tmp_path, name)
    assert find_token(tmp_path, name, 0) == "another folder of this name"
    assert find_token(tmp_path / "gone", name, 0) == "no such folder"
    with suppress(OSError):
        remove_token(tmp_path / "gone", name)


def test_a_hundred_nodes_fit_on_one_screen() -> None:
    """Only some nodes of a large job are listed."""
    error = not_shared({f"n{number}": {"/run": "no such folder"} for number in range(2, 102)}, "n1")
    assert len(error.screen().splitlines()) <= 16
