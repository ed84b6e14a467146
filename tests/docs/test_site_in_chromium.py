"""Every page of the documentation in a real browser, wide and narrow: no code block or table is cut off."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.browser import Browser
from harness.site import build_site

pytestmark = [pytest.mark.browser, pytest.mark.timeout(900)]
# Elements with content wider than themselves, or beyond the window. Two pixels are allowed, because widths are rounded.
CUT_OFF = """(() => {
  const width = document.documentElement.clientWidth;
  const found = [...document.querySelectorAll(
    '.md-content pre, .md-content pre code, .md-content table, .md-content td, .md-content th, .md-content img, ' +
    '.md-typeset__scrollwrap'
  )].filter(element => {
    const box = element.getBoundingClientRect();
    return box.width && (element.scrollWidth > element.clientWidth + 2 || box.right > width + 2 || box.left < -2);
  }).map(element => element.tagName + ': ' + element.textContent.slice(0, 60));
  if (document.documentElement.scrollWidth > width) found.push('the page is wider than its window');
  return found;
})()"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_site(tmp_path_factory.mktemp("site"))


@pytest.mark.parametrize("width", [1280, 400])
def test_no_code_block_or_table_of_the_site_is_cut_off(browser: Browser, site: Path, width: int) -> None:
    pages = sorted(site.rglob("*.html"))
    cut_off = {}
    for file in pages:
        page = browser.open_page(file, width=width)
        if found := page.evaluate(CUT_OFF):
            cut_off[file.relative_to(site).as_posix()] = found
        page.close()

    assert len(pages) > 80
    assert cut_off == {}


def test_a_table_that_is_too_wide_becomes_lists_and_back(browser: Browser, site: Path) -> None:
    page = browser.open_page(site / "comparison.html", width=1280)
    lists = "document.querySelectorAll('table[data-rows-as-lists]').length"
    assert page.evaluate(lists) == 0
    page.resize(400)
    assert page.evaluate(lists) > 0
    cell = "document.querySelector('table[data-rows-as-lists] td[data-column=timm]')"
    assert page.evaluate(f"getComputedStyle({cell}, '::before').content") == '"timm: "'
    page.resize(1280)
    assert page.evaluate(lists) == 0
    page.close()


def test_aligned_comments_move_to_their_commands_and_back(browser: Browser, site: Path) -> None:
    page = browser.open_page(site / "guides" / "laptop.html", width=1280)
    is_aligned = "/paceline doctor {3,}# /.test(document.querySelector('.md-content pre code').textContent)"
    for width in (1280, 400, 1280):
        page.resize(width)
        assert page.evaluate(is_aligned) == (width == 1280)
    page.close()


def test_a_flag_of_a_long_command_stays_in_one_line(browser: Browser, site: Path) -> None:
    page = browser.open_page(site / "tutorials" / "own-pictures.html", width=400)
    lines = """(() => {
      const code = [...document.querySelectorAll('pre code')].find(e => e.textContent.includes('--data-dir'));
      const flag = [...code.querySelectorAll('span')].find(e => e.textContent === '--data-dir');
      return [flag.getClientRects().length, code.textContent.includes('--dataset folder --data-dir pictures')];
    })()"""
    assert page.evaluate(lines) == [1, True]
    page.close()


def test_a_cut_off_line_and_table_are_detected(browser: Browser, site: Path) -> None:
    page = browser.open_page(site / "index.html", width=400)
    assert page.evaluate(CUT_OFF) == []
    page.evaluate("document.querySelector('.md-content pre code').style.whiteSpace = 'pre'")
    page.evaluate("document.querySelector('.md-content pre code').textContent = 'x'.repeat(200)")
    page.evaluate("document.querySelector('.md-content table').style.width = '900px'")
    assert {line.partition(":")[0] for line in page.evaluate(CUT_OFF)} >= {"CODE", "TABLE"}
    page.close()
