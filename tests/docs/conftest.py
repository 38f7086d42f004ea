"""Commands of the pages with less to look at: whether they end well depends on neither more images nor more files."""

from dataclasses import replace

import pytest

from fedlens.data.sources.small import Mnist, Mnist5k
from fedlens.plots import style


@pytest.fixture(autouse=True, scope="module")
def _less(tmp_path_factory):
    """Every fourth image of the digits and of clothing, in a cache of their own; figures as PNG alone."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in (Mnist5k, Mnist):

            def read(self, *files, whole=kind._read):
                found = whole(self, *files)
                return replace(found, train=found.train[::4], test=found.test[::4])

            patch.setattr(kind, "_read", read)
        patch.setenv("FEDLENS_CACHE", str(tmp_path_factory.getbasetemp() / "fewer"))
        patch.delitem(style.KINDS, ".svg")
        yield
