"""Builds the documentation as HTML: `python docs/site.py [FOLDER]`, without a folder build/site.

Pages lie where their Markdown lies, so that links need nothing but another ending. Anything amiss (a broken link, a
picture without a description, a page that nothing leads to) is said, and the exit code is 1.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from urllib.parse import unquote, urlsplit

from jinja2 import Environment
from markdown_it import MarkdownIt
from markdown_it.token import Token
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexer import bygroups, inherit
from pygments.lexers import get_lexer_by_name
from pygments.lexers.shell import BashLexer
from pygments.token import Name, Number, Operator
from pygments.util import ClassNotFound

ROOT = Path(__file__).resolve().parents[1]
NAVIGATION = {
    "Start": ("README.md", "docs/your-images.md", "docs/quickstart.md", "docs/concepts.md", "docs/faq.md"),
    "Methods": ("docs/choose.md", "docs/league.md", "docs/methods.md", "docs/papers.md"),
    "Python": ("docs/python.md", "docs/use-your-model.md", "docs/api.md", "docs/api-experiment.md"),
    "Do more": (
        "docs/extend.md",
        "docs/extend-data.md",
        "docs/faults.md",
        "docs/machines.md",
        "docs/deploy.md",
        "docs/deploy-operate.md",
        "docs/coming-from.md",
    ),
    "Know more": (
        "docs/privacy.md",
        "docs/privacy-fedxds.md",
        "docs/trust.md",
        "docs/speed.md",
        "docs/evidence.md",
        "docs/architecture.md",
        "docs/decisions.md",
        "docs/decisions-deploy.md",
    ),
    "Project": ("CONTRIBUTING.md", "docs/release.md", "CHANGELOG.md"),
    "Results": tuple(sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "results").glob("*.md"))),
}
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md", "results/*.md")
HERE = ROOT / "docs"
SHELL = (
    "fedlens",
    "python",
    "python3",
    "pip",
    "docker",
    "kubectl",
    "git",
    "export",
    "cd",
    "$",
    "flwr",
)  # begin commands
BREAKS = re.compile(r"(?<=\w)([./,=:])(?=\w)")  # of an identifier: a line may end after such a sign


class Commands(BashLexer):
    """Commands, with settings such as partition.alpha=0.1 in the colours of a name and of a number."""

    tokens = {  # noqa: RUF012
        "root": [
            (r"(?<![\w./-])([A-Za-z_][\w.]*)(=)(-?\d[\d.e-]*)(?=\s|$)", bygroups(Name.Variable, Operator, Number)),
            (r"(?<![\w./-])([A-Za-z_]\w*(?:\.\w+)+)(=)", bygroups(Name.Variable, Operator)),
            inherit,
        ]
    }


@dataclass
class Page:
    path: str  # of its Markdown, from the root
    tokens: list[Token]
    title: str = ""
    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)  # as they are written
    contents: list[tuple[int, str, str]] = field(default_factory=list)  # level, anchor and text of headings

    @property
    def place(self) -> str:
        return "index.html" if self.path == "README.md" else str(PurePosixPath(self.path).with_suffix(".html"))


def read(path: Path, markdown: MarkdownIt) -> Page:
    page = Page(path.relative_to(ROOT).as_posix(), markdown.parse(path.read_text("utf-8")))
    for at, token in enumerate(page.tokens):
        if token.type == "heading_open":
            text = "".join(part.content for part in page.tokens[at + 1].children or ())
            page.title = page.title or text
            token.attrs["id"] = anchor(text, page.anchors)
            page.anchors.add(str(token.attrs["id"]))
            if token.tag in ("h2", "h3"):
                page.contents.append((int(token.tag[1]), str(token.attrs["id"]), text))
        find_formulas(token.children or [])
        for part in token.children or ():
            if part.type in ("link_open", "image"):
                page.links.append(str(part.attrs["href" if part.type == "link_open" else "src"]))
    return page


def anchor(text: str, taken: Iterable[str]) -> str:
    """As GitHub names headings."""
    kept = "".join(c for c in text.lower() if c in "-_ " or unicodedata.category(c)[0] in "LN")
    name = kept.replace(" ", "-")
    count = sum(re.fullmatch(rf"{re.escape(name)}(-\d+)?", one) is not None for one in taken)
    return f"{name}-{count}" if count else name


def target(page: Page, link: str) -> tuple[str, str]:
    """(file from the root, anchor) that a link of the repository is about."""
    parts = urlsplit(link)
    path = normpath(str(PurePosixPath(page.path).parent / unquote(parts.path))) if parts.path else page.path
    return path, parts.fragment


def is_outside(link: str) -> bool:
    return bool(urlsplit(link).scheme)


def troubles(pages: dict[str, Page]) -> list[str]:
    found = []
    for page in pages.values():
        for link in page.links:
            if is_outside(link):
                continue
            path, fragment = target(page, link)
            if path.startswith("..") or not (ROOT / path).exists():
                found.append(f"{page.path}: {link} leads nowhere")
            elif fragment and (path not in pages or fragment not in pages[path].anchors):
                found.append(f"{page.path}: {link} names no heading of {path}")
        for token in page.tokens:
            for part in token.children or ():
                if part.type == "image" and not part.content:
                    found.append(f"{page.path}: the picture {part.attrs['src']} has no description")
    listed = [path for group in NAVIGATION.values() for path in group]
    found += [f"{path} is in the navigation, but not there" for path in listed if path not in pages]
    linked = {target(page, link)[0] for page in pages.values() for link in page.links if not is_outside(link)}
    found += [f"nothing leads to {path}" for path in pages if path not in linked and path not in listed]
    return found


def reader() -> MarkdownIt:
    """Markdown as GitHub reads it, with highlighted code and formulas."""
    markdown = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    markdown.add_render_rule("fence", lambda _, tokens, at, *__: block(tokens[at].info.strip(), tokens[at].content))
    markdown.add_render_rule("code_inline", lambda _, tokens, at, *__: inline(tokens[at].content))
    markdown.add_render_rule("formula", lambda _, tokens, at, *__: formula(tokens[at].content, 12))
    return markdown


def block(language: str, text: str) -> str:
    """Code in colours; ```math as a formula."""
    if language == "math":
        return f'<div class="formula">{formula(text.strip(), 15)}</div>\n'
    first = text.split(maxsplit=1)[0] if text.split() else ""
    name = language.split()[0] if language else "bash" if first in SHELL or text.startswith("#") else ""
    how = {"stripnl": False, "ensurenl": False}
    try:
        lexer = Commands(**how) if name == "bash" else get_lexer_by_name(name, **how) if name else None
    except ClassNotFound:
        lexer = None
    shown = highlight(text, lexer, HtmlFormatter(nowrap=True)) if lexer else escape(text)
    return f"<pre><code>{shown}</code></pre>\n"


def inline(text: str) -> str:
    """A long identifier may break after a sign, never within a word."""
    shown = escape(text)
    return "<code>" + (BREAKS.sub(r"\1<wbr>", shown) if len(text) > 24 else shown) + "</code>"


def find_formulas(parts: list[Token]) -> None:
    """$`...`$ within a line is a formula, as GitHub has it."""
    for before, code, after in zip(parts, parts[1:], parts[2:], strict=False):
        if code.type == "code_inline" and before.content.endswith("$") and after.content.startswith("$"):
            code.type, before.content, after.content = "formula", before.content[:-1], after.content[1:]


def formula(text: str, size: float) -> str:
    """As SVG in the colour of the text: matplotlib sets it, so that no page needs a script from elsewhere."""
    from matplotlib import mathtext
    from matplotlib.font_manager import FontProperties

    drawn = io.BytesIO()
    mathtext.math_to_image(f"${text}$", drawn, FontProperties(size=size), dpi=72, format="svg")
    svg = drawn.getvalue().decode()
    svg = svg[svg.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{escape(text, quote=True)}"', 1)
    svg = re.sub(r"<metadata>.*?</metadata>|<rect[^>]*/>|<g id=\"patch_1\">.*?</g>", "", svg, flags=re.S)
    return svg.replace("<g", '<g fill="currentColor"', 1)


def sections(page: Page) -> Iterator[dict[str, str]]:
    """A page by its headings, as text for the search."""
    heading, at, words = page.title, page.place, list[str]()
    for number, token in enumerate(page.tokens):
        if token.type == "heading_open":
            if words:
                yield {"page": page.title, "heading": heading, "at": at, "text": " ".join(" ".join(words).split())}
            heading = "".join(part.content for part in page.tokens[number + 1].children or ())
            at, words = f"{page.place}#{token.attrs['id']}", []
        elif token.type in ("fence", "code_block"):
            words.append(token.content)
        elif token.type == "inline":
            words += [part.content for part in token.children or () if part.type in ("text", "code_inline")]
    yield {"page": page.title, "heading": heading, "at": at, "text": " ".join(" ".join(words).split())}


def build(out: Path) -> list[str]:
    """Write the site, and say what is amiss with it."""
    markdown = reader()
    pages = {p.path: p for pattern in PAGES for p in (read(path, markdown) for path in sorted(ROOT.glob(pattern)))}
    template = Environment(autoescape=False).from_string((HERE / "site.html").read_text("utf-8"))
    files = {"docs/site.css", "docs/site.js"}
    for page in pages.values():
        for token in page.tokens:
            for part in token.children or ():
                name = "href" if part.type == "link_open" else "src" if part.type == "image" else ""
                if not name or is_outside(link := str(part.attrs[name])):
                    continue
                path, fragment = target(page, link)
                if path in pages:
                    part.attrs[name] = way(page, pages[path].place) + (f"#{fragment}" if fragment else "")
                elif (ROOT / path).is_file():
                    files.add(path)
        navigation = {
            group: [
                {"title": pages[path].title, "target": way(page, pages[path].place), "here": path == page.path}
                for path in paths
                if path in pages
            ]
            for group, paths in NAVIGATION.items()
        }
        body = markdown.renderer.render(page.tokens, markdown.options, {})
        body = re.sub(r"<th( [^>]*)?></th>", r"<td\1></td>", body)  # a corner heads nothing
        contents = [(level, id, escape(text)) for level, id, text in page.contents]
        more = {"contents": contents if len(contents) > 1 else [], "up": "../" * page.place.count("/")}
        text = template.render(title=page.title, body=body, navigation=navigation, **more)
        (out / page.place).parent.mkdir(parents=True, exist_ok=True)
        (out / page.place).write_text(text, "utf-8")
    entries = [entry for page in pages.values() for entry in sections(page)]
    index = json.dumps(entries, ensure_ascii=False, separators=(",", ":"))
    (out / "docs" / "search.js").write_text(f"window.SEARCH={index};\n", "utf-8")
    for path in files:
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, out / path)
    return troubles(pages)


def way(page: Page, place: str) -> str:
    return relpath(place, str(PurePosixPath(page.place).parent))


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "build" / "site"
    amiss = build(out)
    print(*amiss, out / "index.html", sep="\n")
    sys.exit(1 if amiss else 0)


if __name__ == "__main__":
    main()
