"""Reports prose that is hard to read: `python docs/check.py [--fail] [FILE ...]`, without files all documents.

It counts sentences above 30 words, table cells above 25 words, and words that we do not use, each with its replacement.
With --fail the exit code is 1 where anything was found.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "docs/methods/*.md", "results/*.md")
LONGEST_SENTENCE, LONGEST_CELL = 30, 25
INSTEAD = {
    r"\blooks? at the global model\b": "evaluation of the global model",
    r"\blast looks\b": "last evaluations",
    r"\bjudged (by|on)\b": "evaluated on",
    r"\bown models?\b": "personal model",
    r"\bhonestly\b": "(leave it out)",
    r"\bnobody looked\b": "we did not check",
    r"\bas it is\b|\bas they are\b": "unchanged, unprotected",
    r"\bletters?\b": "message",
    r"\bgifts?\b": "released image",
    r"\ba hair\b": "a small amount",
    r"\bto the letter\b": "exactly",
    r"\bthe like\b": "(name them)",
    r"\bsimply\b|\bjust\b|\bobviously\b": "(leave it out)",
    r"\butili[sz]e\b": "use",
    r"\bin order to\b": "to",
}


@dataclass(frozen=True)
class Finding:
    path: str
    line: int
    kind: str  # sentence, cell, word
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


def prose(text: str) -> Iterator[tuple[int, str]]:
    """(line of its start, text) of every paragraph, list item and table row; code and headings are left out."""
    paragraph: list[str] = []
    start, fenced = 0, False
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.strip()
        if bare.startswith("```"):
            fenced = not fenced
        ends = fenced or not bare or bare.startswith(("#", "|", "```", "![")) or re.match(r"([-*]|\d+\.) ", bare)
        if ends and paragraph:
            yield start, " ".join(paragraph)
            paragraph = []
        if fenced or not bare or bare.startswith(("#", "```", "![")):
            continue
        if bare.startswith("|"):
            yield number, bare
            continue
        if not paragraph:
            start = number
        paragraph.append(bare)
    if paragraph:
        yield start, " ".join(paragraph)


def sentences(text: str) -> list[str]:
    """A sentence may begin with a capital, a sign, a quotation, a number, or a name in code type."""
    return re.split(r"(?<=[.!?:;])\s+(?=[A-Z`*(\[])|(?<=[.!?])\s+(?=code\b|[\"\d])", text)


def plain(text: str) -> str:
    """Without code, links and emphasis: a command or an address is one word."""
    text = re.sub(r"`[^`]*`", "code", text)
    return re.sub(r"[*_]", "", re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text))


def findings(path: str, text: str) -> Iterator[Finding]:
    for line, block in prose(text):
        said = plain(block)
        if block.startswith("|"):
            for cell in said.strip("|").split("|"):
                if (count := len(cell.split())) > LONGEST_CELL:
                    yield Finding(path, line, "cell", f"a cell of {count} words: {cell.strip()[:60]}...")
        else:
            for sentence in sentences(said):
                if (count := len(sentence.split())) > LONGEST_SENTENCE:
                    yield Finding(path, line, "sentence", f"a sentence of {count} words: {sentence[:60]}...")
        for pattern, better in INSTEAD.items():
            for found in re.finditer(pattern, said, re.I):
                yield Finding(path, line, "word", f"'{found.group()}': {better}")


def main(words: list[str]) -> int:
    strict = "--fail" in words
    named = [Path(word) for word in words if word != "--fail"]
    paths = named or [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    found = [one for path in paths for one in findings(str(path), path.read_text("utf-8"))]
    for one in found:
        print(str(one).replace(f"{ROOT}/", ""))
    counts = ", ".join(f"{sum(one.kind == kind for one in found)} {kind}s" for kind in ("sentence", "cell", "word"))
    print(f"{len(paths)} pages: {counts} to mend")
    return int(strict and bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
