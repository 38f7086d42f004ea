"""The documents' site in a real Chromium."""

from pathlib import Path

import pytest

from browser import Chromium, axe, needs_axe, needs_chromium
from test_docs import site

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("site")
    site().build(out)
    return out


@pytest.fixture(scope="module")
def browser():
    with Chromium() as started:
        yield started


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1400, 390])
@needs_axe
def test_axe_finds_nothing(browser, built, width, dark):
    for name in ("index.html", "docs/quickstart.html", "docs/methods/scaffold.html", "docs/api.html"):
        with browser.open((built / name).as_uri(), width, 900, phone=width < 800, dark=dark) as page:
            passed, found = axe(page)
            assert passed > 15 and found == [], name


def test_search_copy_and_menu_in_a_browser(browser, built):
    with browser.open((built / "docs" / "methods" / "scaffold.html").as_uri(), 1400, 900) as page:
        page.until("document.querySelectorAll('.copy').length > 0")
        assert page.evaluate(
            "document.querySelectorAll('main pre').length === document.querySelectorAll('.copy').length"
        )
        page.evaluate("scrollTo(0, 1500)")
        assert page.evaluate("document.querySelector('.menu').getBoundingClientRect().top") == 0
        assert page.evaluate("document.querySelector('.contents').getBoundingClientRect().top") == 0
        page.evaluate("const f = document.querySelector('.search input'); f.value = 'dirichlet dialect';"
                      "f.dispatchEvent(new Event('input'))")  # fmt: skip
        page.until("document.querySelectorAll('.hits a').length > 0")
        assert "irichlet" in page.evaluate("document.querySelector('.hits').textContent")
        page.resize(390, 844, phone=True)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert page.errors == []


def test_a_copy_button_covers_no_code_where_it_is_always_shown(browser, built):
    """On a phone; with a mouse it appears when one points at the block."""
    covered = (
        "[...document.querySelectorAll('.block')].filter((b) => { const range = document.createRange();"
        "range.selectNodeContents(b.querySelector('code'));"
        "const button = b.querySelector('.copy').getBoundingClientRect();"
        "return [...range.getClientRects()].some((r) => r.top < button.bottom - 1 && r.right > button.left"
        " && r.left < button.right && r.bottom > button.top + 1); }).length"
    )
    with browser.open((built / "docs" / "quickstart.html").as_uri(), 390, 844, phone=True) as page:
        page.until("document.querySelectorAll('.copy').length > 3")
        assert page.evaluate("matchMedia('(hover: none)').matches") and page.evaluate(covered) == 0
        page.evaluate("document.querySelectorAll('.block pre').forEach((e) => { e.style.paddingTop = 0; })")
        assert page.evaluate(covered) > 0  # which would be found
