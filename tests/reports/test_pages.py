"""Pages: all input is text, the same input gives the same bytes, and every run writes one."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.pages import HOSTILE, PIXEL, every_block, every_chart, write_run
from harness.ranks import make_world, run_ranks
from harness.runs import quick_config, train_in
from paceline.cli.main import main
from paceline.data.augment import Pipeline
from paceline.data.loader import Loader
from paceline.reports.charts import Chart, Series
from paceline.reports.compare_page import Finding, write_compare_page
from paceline.reports.page import MOST_POINTS, Gallery, Picture, Section, render_page, safe_json, show_number, thin
from paceline.reports.run_page import try_to_write_run_page, write_run_page
from paceline.runs.folder import RunFolder
from paceline.settings.load import to_yaml
from paceline.training.components import build_components
from paceline.training.evaluate import evaluate
from paceline.training.examples import MOST_EXAMPLES, Examples

ASSETS = Path(__file__).resolve().parents[2] / "src" / "paceline" / "reports" / "assets"


class Reader(HTMLParser):
    """The tags and the text of a page, as a browser parses them."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def text(self) -> str:
        return " ".join("".join(self.texts).split())


def specs_in(page: str) -> list[dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="chart-specs">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    specs: list[dict[str, Any]] = json.loads(found[1], parse_constant=pytest.fail)
    return specs


# --- A page


def test_no_input_becomes_markup() -> None:
    page = render_page(HOSTILE, every_block(), subtitle=HOSTILE, verdict=HOSTILE, footer=HOSTILE)
    read = Reader(page)
    assert len(read.all("script")) == 2  # the data and the code
    assert [image["src"] for image in read.all("img")] == [PIXEL]
    assert not read.all("b")
    assert "onerror" not in {name for _, attributes in read.tags for name in attributes}
    assert read.text.count('<img src=x onerror="alert(1)">') >= 10
    assert specs_in(page)[0]["series"][1]["name"] == HOSTILE


def test_a_page_loads_nothing_and_runs_only_its_own_script() -> None:
    page = render_page("a page", every_block())
    read = Reader(page)
    policy = next(str(meta["content"]) for meta in read.all("meta") if "http-equiv" in meta)
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'sha256-")
    assert "unsafe" not in policy
    links = [str(value) for _, a in read.tags for name, value in a.items() if name in ("href", "src")]
    assert all(link.startswith(("data:", "#")) for link in links), links
    ids = {a["id"] for _, a in read.tags if "id" in a}
    assert {link[1:] for link in links if link.startswith("#")} <= ids


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    assert render_page("a page", every_block()) == render_page("a page", every_block())
    folder = write_run(tmp_path / "run")
    first = write_run_page(folder.path).read_bytes()
    assert write_run_page(folder.path).read_bytes() == first


def test_paragraphs_support_bold_code_and_links_into_the_page() -> None:
    page = render_page("p", [Section("S", ["**b** `c < d` [w](#s) [out](https://example.org) **`x`**"])])
    assert '<p><strong>b</strong> <code>c &lt; d</code> <a href="#s">w</a> [out](https://example.org)' in page


def test_a_picture_must_be_in_the_page() -> None:
    with pytest.raises(ValueError, match="data: URI"):
        render_page("p", [Section("S", [Gallery([Picture("https://example.org/x.png", "x")])])])


def test_nan_becomes_a_gap_in_the_data() -> None:
    text = safe_json({"y": [1.0, math.nan, math.inf, 2, "</script>&"], "x": range(2)})
    assert json.loads(text) == {"y": [1.0, None, None, 2, "</script>&"], "x": [0, 1]}
    assert not set("<>&") & set(text)


def test_numbers_in_tables_are_short_and_sortable() -> None:
    assert [show_number(n) for n in (20000, 1234567.8, 3.14159, 0.0, 1e-7)] == [
        "20,000",
        "1,234,568",
        "3.142",
        "0",
        "1.00e-07",
    ]
    page = render_page("p", every_block())
    assert '<td class="number" data-value="20000">20,000</td><td class="number" data-value="9">9%</td>' in page
    assert '<table class="sortable">' in page


def test_the_assets_are_small_and_only_ours() -> None:
    files = sorted(ASSETS.iterdir())
    assert [file.name for file in files] == ["bars.js", "charts.js", "page.css", "page.js"]
    assert sum(file.stat().st_size for file in files) < 60_000
    assert not any("http" in file.read_text().replace("http://www.w3.org/2000/svg", "") for file in files)


# --- Long curves


def test_thin_keeps_ends_peaks_and_gaps() -> None:
    y: list[float | None] = [math.sin(n / 700) for n in range(20_000)]
    y[7_777], y[13_131], y[5_000] = 9.0, -9.0, None
    series = thin(Series("loss", y, range(20_000), low=y, high=y))
    assert len(series.y) <= MOST_POINTS
    assert len(series.x) == len(series.y) == len(series.low) == len(series.high)
    assert series.x[0] == 0
    assert series.x[-1] == 19_999
    kept = dict(zip(series.x, series.y, strict=True))
    assert kept[7_777] == 9.0
    assert kept[13_131] == -9.0
    assert kept[5_000] is None
    assert list(series.x) == sorted(series.x)


def test_short_curves_are_unchanged_and_long_ones_are_thinned() -> None:
    short = Series("a", [1.0] * MOST_POINTS)
    assert thin(short) is short
    specs = specs_in(render_page("p", [Section("S", every_chart())]))
    assert max(len(series["y"]) for spec in specs for series in spec.get("series", [])) <= MOST_POINTS
    assert min(len(series["y"]) for series in specs[0]["series"]) == 2


# --- A run's page


def test_the_page_of_a_finished_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "my-run")
    page = write_run_page(folder.path).read_text()
    read = Reader(page)
    assert "Finished. 90.00% of 200 test samples" in read.text
    assert "with the weights of epoch 3; it survived 1 failure" in read.text
    assert "computed 10 steps again" in read.text
    ids = [spec["id"] for spec in specs_in(page)]
    curves = ["epoch-loss", "epoch-accuracy", "step-loss", "lr", "grad-norm", "throughput", "memory", "data-wait"]
    assert ids == [*curves, "confusion", "classes"]
    assert specs_in(page)[2]["marks"] == [{"x": 60.0, "label": "rank 1 failed"}]
    for words in (
        "1:08",
        "3,001",
        "rank 1 was ended by SIGKILL",
        "kill (rank 1, step 60)",
        "high confidence",
    ):
        assert words in read.text, words
    # Changed settings come first, with their defaults.
    assert re.search(r"<td>epochs</td><td[^>]*>4</td><td[^>]*>10</td>", page)
    assert page.index("<td>base_lr</td>") < page.index("<td>momentum</td>")


@pytest.mark.parametrize(
    ("state", "words"), [("failed", "Failed at step 100: the disk is full."), ("preempted", "Stopped and saved")]
)
def test_the_page_of_an_unfinished_run_says_so(tmp_path: Path, state: str, words: str) -> None:
    folder = write_run(tmp_path / "run", state=state)
    page = write_run_page(folder.path).read_text()
    assert words in Reader(page).text
    assert "step-loss" in [spec["id"] for spec in specs_in(page)]
    assert "Confusion" not in page


def test_missing_or_truncated_files_are_skipped(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    names = ("config", "environment", "status", "metrics_jsonl", "results", "failures", "faults", "examples")
    for name in names:
        path: Path = getattr(folder, name)
        whole = path.read_text()
        for broken in ("", "[1, 2]\n", whole[: len(whole) // 2], None):
            path.unlink() if broken is None else path.write_text(broken)
            assert write_run_page(folder.path).stat().st_size > 40_000
        path.write_text(whole)
    for name in names:
        getattr(folder, name).unlink()
    assert "not known how this run ended" in Reader(write_run_page(folder.path).read_text()).text


def test_the_name_of_a_run_cannot_break_its_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "x<script>y", name="file.py:<script>alert(1)</script>")
    read = Reader(write_run_page(folder.path).read_text())
    assert len(read.all("script")) == 2
    assert "<script>alert(1)</script>" in read.text


def test_a_page_that_cannot_be_written_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(tmp_path / "run")
    folder.report.mkdir()
    try_to_write_run_page(folder)
    assert "warning: report.html cannot be written" in caplog.text
    folder.report.rmdir()
    monkeypatch.setattr("paceline.reports.run_page.verdict", lambda run: 1 / 0)
    try_to_write_run_page(folder)
    assert "warning: report.html cannot be made" in caplog.text


# --- Examples


def pictures_and_answers(
    count: int = 64, classes: int = 4
) -> tuple[Pipeline, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (count, 3, 8, 8), generator=generator, dtype=torch.uint8)
    pipeline = Pipeline("none", 0, (3, 8, 8), 8, False, 0, (0.5, 0.4, 0.3), (0.2, 0.3, 0.25))
    labels = torch.arange(count) % classes
    return pipeline, raw, labels, torch.randn(count, classes, generator=generator)


def test_examples_are_the_most_confident_wrong_ones_and_right_ones_of_many_classes() -> None:
    pipeline, raw, labels, logits = pictures_and_answers()
    examples = Examples(pipeline, 1)
    examples.collect(pipeline.for_evaluation(raw), labels, logits)
    chosen = examples.chosen()
    assert len(chosen) == MOST_EXAMPLES
    confidence, predicted = logits.softmax(1).max(1)
    wrong = [example for example in chosen if example.true != example.predicted]
    surest = confidence[predicted != labels].sort(descending=True).values[: len(wrong)]
    assert [example.confidence for example in wrong] == surest.tolist()
    assert {example.true for example in chosen[len(wrong) :]} == {0, 1, 2, 3}
    # The picture is bit-equal to the raw one.
    place = int((confidence == surest[0]).nonzero())
    assert torch.equal(wrong[0].picture, raw[place])


def test_examples_use_few_batches_spread_over_the_pass() -> None:
    pipeline, raw, labels, logits = pictures_and_answers()
    inputs = pipeline.for_evaluation(raw)
    examples = Examples(pipeline, 80)
    looked = []
    for number in range(80):
        before = len(examples._found)
        examples.collect(inputs, labels, logits)
        looked += [number] if len(examples._found) > before else []
    assert looked == list(range(0, 80, 10))


def test_vectors_and_nan_give_no_examples(tmp_path: Path) -> None:
    pipeline, raw, labels, logits = pictures_and_answers()
    examples = Examples(pipeline, 1)
    examples.collect(torch.zeros(64, 20), labels, logits)
    examples.collect(pipeline.for_evaluation(raw), labels, logits * math.nan)
    assert examples.chosen() == []
    examples.write(RunFolder(tmp_path), ("a", "b", "c", "d"))
    assert json.loads((tmp_path / "examples.json").read_text()) == {"examples": []}


def test_examples_do_not_change_an_evaluation() -> None:
    world, config = make_world(0, 1), quick_config()
    components = build_components(config, world)
    data: Loader = components.test_data
    bare, watched = (
        evaluate(components.model, data, world, num_classes=10, batch_size=32, examples=examples)
        for examples in (None, Examples(data.pipeline, 1))
    )
    assert (bare.loss, bare.accuracy, bare.confusion) == (watched.loss, watched.accuracy, watched.confusion)


# --- Real runs


def test_a_sharded_run_writes_its_page_and_pictures(tmp_path: Path) -> None:
    flags = ("--epochs=1", "--max-steps=2", "--strategy=fsdp")
    results = run_ranks(2, train_in, str(tmp_path), flags)[0]
    folder = RunFolder(tmp_path)
    assert f"Finished. {results['test_accuracy']:.2%} of" in Reader(folder.report.read_text()).text
    assert folder.report.stat().st_size < 2_000_000
    examples = json.loads(folder.examples.read_text())["examples"]
    assert 1 <= len(examples) <= MOST_EXAMPLES
    assert {example["true"] for example in examples} <= set(results["model_info"]["classes"])


def test_compare_writes_a_page_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, seed in (("one", 1), ("twin", 1), ("other", 2)):
        flags = ("--epochs=1", "--max-steps=2", f"--seed={seed}")
        train_in(make_world(0, 1), name, flags)
        folder = RunFolder(Path(name))
        folder.config.write_text(to_yaml(quick_config(*flags)))  # by the main function of a rank, in a real run
        folder.write_status("finished")
        assert f"everything is in {name}: report.html" in capsys.readouterr().out
    assert main(["compare", "one", "twin"]) == 0
    assert not Path("compare.html").exists()
    capsys.readouterr()
    assert main(["compare", "one", "other", "--json", "--html"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["equal"] is False
    assert "the page is compare.html" in err
    page = Path("compare.html").read_text()
    assert "Not equal" in page
    assert [spec["id"] for spec in specs_in(page)][:2] == ["loss", "distance"]
    assert main(["compare", "one", "twin", "--html", "equal.html"]) == 0
    assert "<strong>Equal</strong>" in Path("equal.html").read_text()
    assert main(["compare", "--html=no/such/page.html", "one", "twin"]) == 2


def test_a_comparison_of_invented_records(tmp_path: Path) -> None:
    from paceline.metrics.recorder import read_rows
    from paceline.runs.comparison import read_record

    folders = [write_run(tmp_path / name) for name in ("a", HOSTILE.replace("/", ""))]
    records = [read_record(folder.path, read_rows(folder.metrics_jsonl)) for folder in folders]
    path = write_compare_page(tmp_path / "c.html", records, [Finding(True, "A and B are equal")], {"steps": ["1", "1"]})
    page = path.read_text()
    assert len(Reader(page).all("script")) == 2
    assert [spec["id"] for spec in specs_in(page)] == ["loss", "val-loss", "val-accuracy", "throughput"]


def test_the_page_of_the_guide_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    guide = Path(__file__).resolve().parents[2] / "docs" / "guides" / "reports.md"
    blocks = re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL)
    exec(next(block for block in blocks if "write_page" in block and "Tiles" in block), {})
    assert "How it scales" in Path("page.html").read_text()


def test_a_chart_has_defaults() -> None:
    spec = Chart("a", "A", "x", "y", [Series("s", [1.0])]).as_json()
    assert spec["kind"] == "line"
    assert spec["marks"] == ()
    assert spec["series"][0]["colour"] is None
