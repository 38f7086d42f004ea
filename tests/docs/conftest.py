"""Commands of the pages with less to look at: whether they end well depends on neither more images nor more files."""

import sys

import pytest

from fedlens.plots import style
from fedlens.report.split_figure import draw_split

drawn: set[object] = {draw_split.__code__}  # tests/data draws it


def drawer() -> object:
    """The function of the package that wants a figure saved."""
    frame = sys._getframe(2)
    while frame and ("fedlens" not in frame.f_code.co_filename or frame.f_code.co_filename == style.__file__):
        frame = frame.f_back
    return frame and frame.f_code


@pytest.fixture(autouse=True, scope="module")
def _less(fewer_images):
    """Figures as PNG alone. Each kind of them is drawn once: drawing takes longer than most commands."""
    from matplotlib.figure import Figure

    save, lay_out = Figure.savefig, Figure.draw_without_rendering

    def saved(figure, path, **options):
        if drawer() in drawn:
            figure.clear()
        drawn.add(drawer())
        save(figure, path, **options)

    def laid_out(figure):
        if drawer() in drawn:
            figure.clear()
        lay_out(figure)

    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(style.KINDS, ".svg")
        patch.setattr(Figure, "savefig", saved)
        patch.setattr(Figure, "draw_without_rendering", laid_out)
        yield
