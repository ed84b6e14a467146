"""The built site: search finds common terms, lessons link to each other, and the commands of the start page work."""

from __future__ import annotations

import html
import itertools
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from harness import documents
from harness.documents import REPOSITORY
from harness.site import build_site, search_index

pytestmark = pytest.mark.docs

# Common search terms. Each has a section in docs/find-it.md.
TERMS = [
    *("pip install", "docker", "notebook", "colab", "windows", "macos", "mps", "tpu", "rocm"),
    *("image classification", "detection", "segmentation", "multi-label", "regression", "self-supervised"),
    *("transfer learning", "fine-tuning", "pretrained", "freeze", "layer decay", "timm", "torchvision", "hugging face"),
    *("lora", "early stopping", "learning rate finder", "learning rate schedule", "warm-up", "hyperparameter search"),
    *("sweep", "gradient accumulation", "gradient clipping", "mixed precision", "amp", "bf16", "fp16"),
    *("torch.compile", "cuda graphs", "batch size finder", "out of memory", "oom", "gradient checkpointing", "ema"),
    *("swa", "optimizers", "class imbalance", "class weights", "focal loss", "label smoothing", "callbacks"),
    *("data augmentation", "mixup", "cutmix", "randaugment", "albumentations", "validation", "k-fold"),
    *("cross-validation", "webdataset", "16-bit", "multi-gpu", "ddp", "fsdp", "deepspeed", "torchrun", "slurm"),
    *("kubernetes", "resume", "checkpoint", "preemption", "spot", "reproducibility", "deterministic", "seed"),
    *("syncbatchnorm", "hang", "nccl timeout", "tensorboard", "wandb", "weights & biases", "mlflow", "comet"),
    *("confusion matrix", "top-5 accuracy", "f1", "auc", "grad-cam", "embeddings", "profiler", "inference", "predict"),
    *("test-time augmentation", "tta", "onnx", "torchscript", "safetensors", "tensorrt", "coreml", "tflite"),
    *("quantization", "pruning", "serving", "rest api", "model card", "parquet", "tar", "zip", "s3", "ffcv", "lmdb"),
    *("silent data corruption", "faulty gpu", "audit", "provenance", "runs differ", "unlearning", "mislabelled"),
]
_NOT_PROSE = ("pre", "code", "script", "style")
WORDS = re.compile(r"[\s\-_,:!=\[\]()\\\"`/]+")  # the index separates words in the same way


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_site(tmp_path_factory.mktemp("site"))


def words_of(text: str) -> set[str]:
    return {word for word in WORDS.split(html.unescape(text).lower()) if word}


def test_search_finds_a_section_about_every_common_term(site: Path) -> None:
    answers = [item for item in search_index(site) if item["location"].startswith("find-it.html#") and item["text"]]

    missing = [term for term in TERMS if not any(words_of(term) <= words_of(item["title"]) for item in answers)]

    assert answers
    assert missing == []


def test_a_missing_feature_names_an_alternative(site: Path) -> None:
    """More words must follow "not available"."""
    bare = [
        item["title"]
        for item in search_index(site)
        if item["location"].startswith("find-it.html#")
        and re.fullmatch(r"\s*not available\.?\s*", re.sub(r"<[^>]*>", "", item["text"]).lower())
    ]

    assert bare == []


class _Prose(HTMLParser):
    """The text of a page outside of code and scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.text = ""
        self._depth = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self._depth += tag in _NOT_PROSE

    def handle_endtag(self, tag: str) -> None:
        self._depth -= tag in _NOT_PROSE

    def handle_data(self, data: str) -> None:
        self.text += "" if self._depth else data


def test_no_page_shows_markdown_that_was_not_rendered(site: Path) -> None:
    """Backticks and links in the text of a page, for example of the answers that a lesson folds."""
    raw = {
        f"{path.relative_to(site)}: {text[max(0, found.start() - 40) : found.end() + 40]!r}"
        for path in site.rglob("*.html")
        for text in [_Prose(path.read_text(encoding="utf-8")).text]
        for found in re.finditer(r"`|\]\(", text)
    }

    assert raw == set()


def test_lessons_are_in_the_sidebar_and_link_to_their_neighbours(site: Path) -> None:
    lessons = sorted(path.name for path in (REPOSITORY / "course").glob("[0-9][0-9]-*"))
    assert len(lessons) == 12
    for number, lesson in enumerate(lessons):
        page = (site / "course" / lesson / "index.html").read_text(encoding="utf-8")
        before = f"../{lessons[number - 1]}/index.html" if number else "../index.html"
        links = re.findall(r'<a href="([^"]*)" class="md-footer__link md-footer__link--(prev|next)"', page)
        assert (before, "prev") in links
        if number + 1 < len(lessons):
            assert (f"../{lessons[number + 1]}/index.html", "next") in links
        sidebar = re.findall(r'<a href="([^"]*)" class="md-nav__link', page)
        assert {f"../{other}/index.html" for other in lessons if other != lesson} <= set(sidebar)


def test_tutorials_are_in_order(site: Path) -> None:
    order = ["install", "own-pictures", "fine-tuning", "export-and-serving", "own-model", "several-gpus", "cluster"]
    for page, following in itertools.pairwise(order):
        text = (site / "tutorials" / f"{page}.html").read_text(encoding="utf-8")
        assert re.findall(r'<a href="([^"]*)" class="md-footer__link md-footer__link--next"', text) == [
            f"./{following}.html"
        ]


def test_every_row_of_the_comparison_is_complete() -> None:
    page = REPOSITORY / "docs" / "comparison.md"
    rows = [line for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("|")]

    empty = [
        row for row in rows if not row.startswith("| |") and any(not cell.strip() for cell in row[1:-1].split("|"))
    ]

    assert len(rows) > 50
    assert empty == []


def test_the_readme_is_short() -> None:
    assert len((REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_five_lines_of_python_train_as_a_shorter_run(tmp_path: Path) -> None:
    """The lines of the start page, with a shorter run."""
    (block,) = [block for block in documents.blocks(REPOSITORY / "docs" / "index.md") if block.language == "python"]
    assert len([line for line in block.text.splitlines() if line]) == 5
    script = block.text.replace("epochs=5", "epochs=1, num_samples=640, global_batch_size=64")
    assert script != block.text

    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=110
    )

    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("runs/*/export-torchscript/model.ts"))
