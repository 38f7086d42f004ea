"""The documents' site in a real Chromium."""

from browser import Chromium, needs_chromium
from test_docs import site


@needs_chromium
def test_search_copy_and_menu_in_a_browser(tmp_path):
    site().build(tmp_path)
    where = (tmp_path / "docs" / "methods" / "scaffold.html").as_uri()
    with Chromium() as browser, browser.open(where, 1400, 900) as page:
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
