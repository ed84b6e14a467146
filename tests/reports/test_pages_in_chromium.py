"""Pages in a real browser: every chart is drawn, reacts to mouse and keys, and the page loads nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.browser import Browser, Page
from harness.cli import paceline
from harness.pages import HOSTILE, every_block, write_run
from harness.study_cells import sixty_four_cells, write_made_page
from paceline.reports.page import write_page
from paceline.reports.run_page import write_run_page

pytestmark = pytest.mark.browser
PHONE = 360
# The drawn elements of a chart: their number, and the number outside of its picture.
DRAWN = """[...document.querySelectorAll('figure.chart')].map(figure => {
  const svg = figure.querySelector('.plot svg');
  if (!svg) return {id: figure.id, drawn: 0, outside: []};
  const edges = svg.getBoundingClientRect();
  const shapes = [...svg.querySelectorAll('path, rect.bar, rect.cell, text')];
  const outside = shapes.filter(shape => {
    const box = shape.getBoundingClientRect();
    const isBeside = box.left < edges.left - 1 || box.right > edges.right + 1;
    return isBeside || box.top < edges.top - 1 || box.bottom > edges.bottom + 1;
  });
  const marks = svg.querySelectorAll('path.line, path.point, rect.bar, rect.cell');
  const isFinite = [...marks].every(mark => !/NaN|Infinity/.test(mark.outerHTML));
  return {id: figure.id, drawn: isFinite ? marks.length : -1, outside: outside.map(shape => shape.outerHTML)};
})"""


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "every block.html"
    return write_page(path, HOSTILE, every_block(), subtitle="made up", verdict="**All** is well.", tone="good")


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run_page(write_run(tmp_path_factory.mktemp("runs") / "my-run").path)


@pytest.fixture(scope="module")
def study_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_made_page(tmp_path_factory.mktemp("study") / "report.html", sixty_four_cells())


@pytest.fixture(scope="module")
def data_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "data.html"
    answer = paceline(
        "data", "look", "shapes-cnn", "--cutmix-alpha=1", "--num-samples=2000", f"--html={path}", cwd=path.parent
    )
    assert answer.code == 0, answer
    return path


@pytest.fixture
def page(browser: Browser, page_file: Path) -> Iterator[Page]:
    opened = browser.open_page(page_file)
    yield opened
    assert opened.errors == []
    assert opened.requests == [page_file.as_uri()]
    opened.close()


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1200, PHONE], ids=["desk", "phone"])
def test_every_chart_is_drawn_inside_its_picture(
    browser: Browser, page_file: Path, run_file: Path, study_file: Path, data_file: Path, width: int, dark: bool
) -> None:
    for file in (page_file, run_file, study_file, data_file):
        page = browser.open_page(file, width=width, dark=dark)
        for chart in page.evaluate(DRAWN):
            assert (chart["drawn"] > 0) == (chart["id"] != "chart-empty"), chart
            assert chart["outside"] == [], chart
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.errors == []
        assert page.requests == [file.as_uri()]
        page.close()


def test_dark_and_light_differ_and_the_button_changes_them(page: Page) -> None:
    colours = "[document.body, document.querySelector('path.line')].map(e => getComputedStyle(e))"
    look = f"{colours}.map(s => s.backgroundColor + s.color + s.stroke)"
    light = page.evaluate(look)
    page.emulate(dark=True)
    dark = page.evaluate(look)
    assert all(a != b for a, b in zip(light, dark, strict=True))
    assert page.evaluate("document.querySelector('.theme').textContent") == "Light"
    page.click(".theme")
    assert page.evaluate(look) == light
    page.emulate(dark=False)
    page.click(".theme")
    assert page.evaluate(look) == dark


def test_the_mouse_shows_values(page: Page) -> None:
    x, y = page.middle_of("#chart-speed .plot svg")
    assert page.evaluate("document.querySelector('#chart-speed .tip').hidden") is True
    page.mouse((x - 20, y), (x - 40, y))
    tip = page.evaluate("document.querySelector('#chart-speed .tip').innerText")
    assert tip.split() == ["ranks", "2", "DDP", "1.9", "(1.8", "to", "2)", "FSDP", "1.7", "ideal", "2"]
    page.mouse((2, 2))
    assert page.evaluate("document.querySelector('#chart-speed .tip').hidden") is True
    page.mouse(page.middle_of("#chart-bars .plot rect.bar"))
    tip = page.evaluate("document.querySelector('#chart-bars .tip').innerText")
    assert tip.split() == ["1", "DDP", "7.4506", "GiB", "FSDP", "7.4506", "GiB"]
    page.mouse(page.middle_of("#chart-matrix rect.cell"))
    tip = page.evaluate("document.querySelector('#chart-matrix .tip').innerText")
    assert tip.split() == ["true", "disc", "predicted", "disc", "190", "of", "190", "100%"]


def test_a_tooltip_stays_inside_a_narrow_page(browser: Browser, page_file: Path) -> None:
    page = browser.open_page(page_file, width=PHONE)
    x, y = page.middle_of("#chart-loss .plot svg")
    for place in (60, x, PHONE - 40):
        page.mouse((place, y))
        edges = page.evaluate(
            "(e => [e.left, e.right])(document.querySelector('#chart-loss .tip').getBoundingClientRect())"
        )
        assert 0 <= edges[0] < edges[1] <= PHONE, edges
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE
    page.close()


def test_the_legend_hides_and_shows_a_series(page: Page) -> None:
    lines = "document.querySelectorAll('#chart-speed .plot path.line').length"
    pressed = "document.querySelector('#chart-speed .legend button').getAttribute('aria-pressed')"
    before = page.evaluate(lines)
    page.click("#chart-speed .legend button")
    assert (page.evaluate(lines), page.evaluate(pressed)) == (before - 1, "false")
    page.click("#chart-speed .legend button")
    assert (page.evaluate(lines), page.evaluate(pressed)) == (before, "true")
    for number in (1, 2, 3):  # without a series the axes stay
        page.click(f"#chart-speed .legend button:nth-child({number})")
    assert page.evaluate(lines) == 0


def test_a_drag_zooms_and_the_button_resets(page: Page) -> None:
    ticks = "[...document.querySelectorAll('#chart-loss .plot svg > text')].map(t => t.textContent).join(' ')"
    whole = page.evaluate(ticks)
    x, y = page.middle_of("#chart-loss .plot svg")
    page.mouse((x - 100, y), (x, y), (x + 100, y), press=True)
    assert page.evaluate(ticks) != whole
    assert page.evaluate("document.querySelector('#chart-loss .reset').hidden") is False
    page.click("#chart-loss .reset")
    assert page.evaluate(ticks) == whole


def test_the_keys_move_through_the_values(page: Page) -> None:
    page.evaluate("document.querySelector('#chart-band .plot svg').focus()")
    said = "document.querySelector('#chart-band .tip b').textContent"
    for key, words in (
        ("ArrowRight", "epoch 1"),
        ("ArrowRight", "epoch 2"),
        ("End", "epoch 4"),
        ("ArrowLeft", "epoch 3"),
    ):
        page.key(key)
        assert page.evaluate(said) == words
    page.key("Escape")
    assert page.evaluate("document.querySelector('#chart-band .tip').hidden") is True


def test_a_chart_has_a_text_for_screen_readers(page: Page) -> None:
    svg = "document.querySelector('#chart-speed .plot svg')"
    assert page.evaluate(f"[{svg}.getAttribute('role'), {svg}.getAttribute('aria-label')]") == ["img", "Speed-up"]
    words = page.evaluate("document.getElementById(" + svg + ".getAttribute('aria-describedby')).textContent")
    assert "DDP: from 1 to 6.2, 4 values" in words
    page.click("#chart-speed details summary")
    cells = "[...document.querySelectorAll('#chart-speed table tr')].map(row => row.innerText.split('\\t').join('|'))"
    assert page.evaluate(cells)[:3] == ["ranks|DDP|FSDP|ideal", "1|1 (1 to 1)|1|1", "2|1.9 (1.8 to 2)|1.7|2"]


def test_tables_sort_by_their_numbers(page: Page) -> None:
    first = "[...document.querySelectorAll('table.sortable tbody tr td:nth-child(2)')].map(cell => cell.textContent)"
    for order in (["20,000", "3", "1.5"], ["1.5", "3", "20,000"], ["3", "20,000", "1.5"]):
        page.click("table.sortable th:nth-child(2) button")
        assert page.evaluate(first) == order


def test_charts_follow_the_width_and_closed_sections_draw_when_opened(page: Page) -> None:
    box = "document.querySelector('#chart-loss .plot svg').getAttribute('viewBox')"
    wide = page.evaluate(box)
    page.resize(700)
    assert page.evaluate(box) != wide
    page.click("details.fold summary")
    assert page.evaluate("document.querySelectorAll('#chart-folded path.line').length") == 1


def test_print_is_light_complete_and_without_controls(browser: Browser, page_file: Path, tmp_path: Path) -> None:
    page = browser.open_page(page_file, dark=True)
    page.emulate(dark=True, media="print")
    style = "(selector, name) => getComputedStyle(document.querySelector(selector))[name]"
    assert page.evaluate(f"({style})('body', 'backgroundColor')") == "rgb(255, 255, 255)"
    assert page.evaluate(f"({style})('nav', 'display')") == "none"
    assert page.evaluate(f"({style})('figure.chart', 'breakInside')") == "avoid"
    ink = page.evaluate(f"({style})('h1', 'color')")
    assert sum(map(int, ink.removeprefix("rgb(").removesuffix(")").split(", "))) < 200
    assert page.pdf(tmp_path / "page.pdf").read_bytes().startswith(b"%PDF")
    assert page.errors == []
    page.close()


def test_hostile_names_stay_text(page: Page) -> None:
    assert page.evaluate("document.title") == HOSTILE
    assert page.evaluate("document.images.length") == 1
    legend = page.evaluate("document.querySelector('#chart-loss .legend button:nth-child(2)').textContent")
    assert legend == HOSTILE


def test_a_large_page_is_drawn_quickly(browser: Browser, page_file: Path, run_file: Path) -> None:
    assert page_file.stat().st_size < 2_000_000
    assert run_file.stat().st_size < 2_000_000
    page = browser.open_page(page_file)
    # Eight charts, one with 1,500 points: too fast to notice. The limit has a margin for a busy machine.
    spent = page.evaluate(
        "(() => { const t = performance.now(); figures.forEach(f => f.redraw()); return performance.now() - t })()"
    )
    assert spent < 1000
    page.close()
