"""The start page and the tutorials, followed unchanged and in order, in one fresh clone."""

from __future__ import annotations

import json

import pytest

from harness import documents
from harness.documents import REPOSITORY
from harness.guides import Newcomer, lines_of
from paceline.launch.gang import free_port

pytestmark = [pytest.mark.guides, pytest.mark.timeout(1200)]
ACTIVATE = ". .venv/bin/activate"
# These need a GPU or weights from the network: --dry-run checks everything else.
DRY_RUN = ("paceline train folder-resnet50", "CUDA_VISIBLE_DEVICES=0,1 paceline train")
NOT_TYPED = {
    "paceline data fetch": "downloads",
    "paceline status RUN": "needs a job",
    "paceline logs RUN": "needs a job",
    "paceline cancel RUN": "needs a job",
}
EXPECTED_CODES = {"paceline compare": 1}  # the runs differ


def follow(person: Newcomer, page: str, exchange: tuple[str, str] = ("", "")) -> str:
    """Save the files that a page shows, and run the lines of each shell block. Returns the output."""
    said = ""
    for block in documents.blocks(REPOSITORY / page):
        text = block.text.replace(*exchange)
        if block.language == "python":
            name = text.partition("\n")[0].removeprefix("# ")
            (person.clone / name).write_text(text)
        elif block.language in documents.SHELL:
            lines = [_as_typed(line) for line in text.replace("\\\n", " ").split("\n")]
            answer = person.types([ACTIVATE, *filter(None, lines)])
            assert answer.code == 0, f"{page}:{block.line}\n{answer.out}{answer.err}"
            said += answer.out
    return said


def _as_typed(line: str) -> str:
    if line.startswith(tuple(NOT_TYPED)):
        return ""
    if line.startswith(DRY_RUN):
        return f"{line} --dry-run"
    code = next((code for start, code in EXPECTED_CODES.items() if line.startswith(start)), 0)
    return f"{line}; test $? -eq {code}" if code else line


def test_start_page_installs_and_trains(reader: Newcomer) -> None:
    page = "docs/index.md"

    answer = reader.types(lines_of(page, with_text="pip install") + lines_of(page, with_text="paceline train"))

    assert answer.code == 0, answer.out + answer.err
    (run,) = (reader.clone / "runs").glob("shapes-cnn-*")
    assert (run / "report.html").is_file()


def test_install(reader: Newcomer) -> None:
    answer = reader.types(lines_of("docs/tutorials/install.md", with_text="pip install"))

    assert answer.code == 0, answer.out + answer.err


def test_own_pictures(reader: Newcomer) -> None:
    follow(reader, "docs/tutorials/own-pictures.md")

    results = json.loads((reader.clone / "runs" / "pictures" / "results.json").read_text())
    assert results["test_accuracy"] > 0.9  # "about 100 %"


def test_fine_tuning(reader: Newcomer) -> None:
    follow(reader, "docs/tutorials/fine-tuning.md")

    results = json.loads((reader.clone / "runs" / "tuned" / "results.json").read_text())
    assert results["test_accuracy"] > 0.9


def test_export_and_serving_at_a_free_port(reader: Newcomer) -> None:
    """Port 8000 of the page may be used on this machine."""
    said = follow(reader, "docs/tutorials/export-and-serving.md", ("8000", str(free_port())))

    (answer,) = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert answer["label"] == "cross"
    assert (reader.clone / "runs" / "pictures" / "export-torchscript" / "model.ts").is_file()


def test_own_model(reader: Newcomer) -> None:
    follow(reader, "docs/tutorials/own-model.md")

    assert (reader.clone / "runs" / "small-net" / "results.json").is_file()


def test_several_gpus_as_a_dry_run_and_on_cpus(reader: Newcomer) -> None:
    follow(reader, "docs/tutorials/several-gpus.md")


def test_cluster_as_a_dry_run(reader: Newcomer) -> None:
    follow(reader, "docs/tutorials/cluster.md")
