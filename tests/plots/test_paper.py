"""Figures for a paper: width, letters, fonts, a panel a file."""

from __future__ import annotations

import re

import matplotlib
import pytest
import torch
from matplotlib.text import Text

from fedlens.attribution import draw_grid
from fedlens.core.errors import BadInput
from fedlens.plots import paper, style


def two_panels():
    figure, axes = style.pyplot().subplots(1, 2, figsize=(12, 4), sharey=True, layout="constrained")
    for axis, name in zip(axes, ("rounds", "bytes sent"), strict=True):
        axis.plot([1, 2, 3], [50, 70, 80], label="fedavg")
        axis.text(2, 60, "tiny", fontsize=3)
        axis.set(xlabel=name, label=name)
    axes[0].set_ylabel("accuracy, %")
    axes[0].set_title("a title that is much longer than a column of a paper is wide, and goes on")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center")
    style.caption(figure, "How to read it.")
    return figure


def width_of(pdf) -> float:
    return float(re.search(rb"/MediaBox \[ ?0 0 ([\d.]+)", pdf.read_bytes())[1]) / 72


def test_a_panel_is_a_file_of_the_width(tmp_path, every_kind):
    figure = two_panels()
    with paper.printed(3.3) as written:
        style.save(figure, tmp_path / "curves")
    names = ["curves-rounds", "curves-bytes-sent"]
    assert written == [tmp_path / f"{name}.png" for name in names] and (tmp_path / "curves.png").exists()
    assert all((tmp_path / f"{name}{kind}").stat().st_size for name in names for kind in style.KINDS)
    assert [width_of(tmp_path / f"{name}.pdf") for name in names] == pytest.approx([3.3, 3.3], abs=0.01)
    assert (tmp_path / "curves.txt").read_text() == "How to read it.\n"
    shown = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    assert min(text.get_fontsize() for text in shown) >= paper.LEAST
    assert figure.axes[1].get_ylabel() == "accuracy, %"  # which the left panel had for both
    assert "\n" in figure.axes[0].get_title() and [text.get_text() for text in figure.legends[0].get_texts()] == [
        "fedavg"
    ]


@pytest.mark.parametrize(("count", "columns"), [(1, 1), (2, 2), (3, 3), (4, 2), (5, 3), (7, 3)])
def test_a_legend_has_rows_as_equal_as_can_be(tmp_path, count, columns):
    figure, axis = style.pyplot().subplots()
    for number in range(count):
        axis.plot([1, 2], [3, number], label=f"method{number}")
    axis.legend()
    with paper.printed(3.3):
        style.save(figure, tmp_path / "curves")
    assert figure.legends[0]._ncols == columns  # three such names are what 3.3 inches hold


def test_fonts_are_true_type(tmp_path, every_kind):
    path = style.save(two_panels(), tmp_path / "a").with_suffix(".pdf")
    assert b"/Type3" not in path.read_bytes() and b"/CIDFontType2" in path.read_bytes()
    other = two_panels()
    with matplotlib.rc_context({"pdf.fonttype": 3}):
        other.savefig(tmp_path / "b.pdf")
    assert b"/Type3" in (tmp_path / "b.pdf").read_bytes()  # what is looked for would be found


def test_a_grid_stays_one_figure(tmp_path):
    maps = {"integrated gradients": torch.rand(2, 8, 8), "LRP": torch.rand(2, 8, 8) - 0.5}
    with paper.printed(2.0) as written:
        draw_grid(torch.rand(2, 3, 8, 8), maps, tmp_path / "grid.pdf", ["cat", "dog"])
    assert written == [tmp_path / "grid.pdf"] and width_of(written[0]) == pytest.approx(2.0, abs=0.01)
    assert b"/Type3" not in written[0].read_bytes() and "red speaks" in (tmp_path / "grid.txt").read_text()


def test_without_it_nothing_is_added(tmp_path):
    with paper.printed(3.3) as written, paper.screen():
        style.save(two_panels(), tmp_path / "curves")
    assert written == [] and {path.stem for path in tmp_path.iterdir()} == {"curves"}


def test_widths():
    lengths = [paper.inches(text) for text in ("3.3in", "84mm", "8.4 cm", "240pt")]
    assert lengths == pytest.approx([3.3, 3.307, 3.307, 3.321], abs=1e-3)
    for text in ("3.3", "wide", "0.1in", "300in", "-3in"):
        with pytest.raises(BadInput, match=r"--width is .*such as 3\.3in"):
            paper.inches(text)
