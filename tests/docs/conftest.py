"""Commands of the pages with less to look at: whether they end well depends on neither more images nor more files."""

import pytest

from fedlens.plots import style


@pytest.fixture(autouse=True, scope="module")
def _less(fewer_images):
    """Figures as PNG alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(style.KINDS, ".svg")
        yield
