"""docs/check.py finds what is hard to read; docs/architecture.py writes what the code is."""

from pathlib import Path

import pytest

from scripts import script

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


check, architecture = script("docs/check.py"), script("docs/architecture.py")
LONG = "word " * 31


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        (f"Short. {LONG.strip()}.", ["sentence"]),
        (f"A first half: {'word ' * 20}. {'Word ' * 20}.", []),
        (f"| a | {'word ' * 26}|", ["cell"]),
        (f"| a | {'word ' * 25}|", []),
        ("It is judged by the global model.", ["word"]),
        (f"```\n{LONG}\n```", []),
        (f"# {LONG}", []),
        ("`" + LONG + "` is one word.", []),
    ],
)
def test_findings(text, kinds):
    assert [one.kind for one in check.findings("page.md", text)] == kinds


def test_a_finding_names_its_line_and_the_exit_code_is_asked_for(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n\nFine.\n\n{LONG}\n")
    assert check.main([str(page)]) == 0 and check.main(["--fail", str(page)]) == 1
    assert "page.md:5: a sentence of 31 words" in capsys.readouterr().out


def test_the_architecture_page_is_not_stale():
    assert (DOCS / "architecture.md").read_text("utf-8") == architecture.page(), "run python docs/architecture.py"
    assert (DOCS / "images" / "architecture.svg").read_text("utf-8") == architecture.picture()
