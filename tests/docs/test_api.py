"""Every public name has types and a docstring, and the page about them is what the code says today."""

from pathlib import Path

import pytest

import fedlens
from scripts import script

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def api():
    return script("docs/api.py")


def test_the_pages_are_not_stale(api):
    pages = api.pages()
    for path, text in pages.items():
        assert path.read_text("utf-8") == text, path.name
        assert text.count("\n") <= 200, path.name
    for name in fedlens.__all__:
        on = [path.name for path, text in pages.items() if f"\n## {name}\n" in text]
        assert len(on) == (not name.startswith("__")), name


def test_what_lacks_types_or_words_is_refused(api):
    def bare(run, round: int) -> None:
        """Words."""

    def silent(run: str) -> None: ...

    for made in (bare, silent):
        with pytest.raises(SystemExit, match="lacks a docstring or type hints"):
            api.described(made.__name__, made)
    assert api.undocumented(bare) == ["(run)"]
