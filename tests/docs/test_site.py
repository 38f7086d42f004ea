"""The documents' site: contents, colours, formulas, search."""

from __future__ import annotations

import json
import re

import pytest

from test_docs import site


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    site().build(out)
    return out


def test_a_page_lists_its_headings(built):
    text = (built / "docs" / "methods" / "scaffold.html").read_text("utf-8")
    contents = re.search(r'<aside class="contents">(.*?)</aside>', text, re.S)[1]
    assert re.findall(r'href="#([^"]+)"', contents) == re.findall(r'<h[23] id="([^"]+)"', text)
    assert "when-to-use-it" in contents


def test_code_has_colours_and_stays_as_it_is():
    page = site()
    shown = page.block("python", 'x = "a < b"  # why\n')
    assert '<span class="c1"># why</span>' in shown and "&lt;" in shown and "<pre><code>" in shown
    commands = page.block("", "fedlens run rounds=3  # a look\n")
    assert 'class="c1"' in commands and re.sub("<[^>]+>", "", commands) == "fedlens run rounds=3  # a look\n\n"
    said = page.block("bash", "fedlens run partition.alpha=0.1 model.is=cnn rounds=20 --out a=b/c.txt\n")
    for name, value in (("partition.alpha", "0.1"), ("rounds", "20")):
        assert f'<span class="nv">{name}</span><span class="o">=</span><span class="m">{value}</span>' in said
    assert '<span class="nv">model.is</span><span class="o">=</span>cnn' in said
    assert page.block("", "g ← c & d\n") == "<pre><code>g ← c &amp; d\n</code></pre>\n"
    assert page.block("no-such-language", "x\n") == "<pre><code>x\n</code></pre>\n"


def test_identifiers_break_after_signs_alone():
    page = site()
    assert page.inline("algorithm.server_lr") == "<code>algorithm.server_lr</code>"
    long = page.inline("fedlens.compare.table.Comparison_of_methods")
    assert long == "<code>fedlens.<wbr>compare.<wbr>table.<wbr>Comparison_of_methods</code>"


def test_formulas_are_drawn_without_a_script():
    page = site()
    text = "A mean, $`\\bar{w} = \\frac{1}{n}\\sum_k w_k`$, costs $5 and $6.\n\n```math\nx^2\n```\n"
    markdown = page.reader()
    tokens = markdown.parse(text)
    for token in tokens:
        page.find_formulas(token.children or [])
    shown = markdown.renderer.render(tokens, markdown.options, {})
    assert shown.count("<svg") == 2 and 'aria-label="x^2"' in shown and "costs $5 and $6." in shown
    assert "currentColor" in shown and "<script" not in shown and "http" not in re.sub(r'xmlns[^"]*"[^"]*"', "", shown)


def test_the_index_knows_every_page(built):
    text = (built / "docs" / "search.js").read_text("utf-8")
    entries = json.loads(text.removeprefix("window.SEARCH=").removesuffix(";\n"))
    for entry in entries:
        file, _, anchor = entry["at"].partition("#")
        assert not anchor or f'id="{anchor}"' in (built / file).read_text("utf-8"), entry["at"]
    pages = {path.relative_to(built).as_posix() for path in built.rglob("*.html")}
    assert {entry["at"].partition("#")[0] for entry in entries} == pages
    assert any("control variates" in entry["text"] for entry in entries if entry["page"] == "Scaffold")
