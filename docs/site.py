"""Builds the documentation as HTML: `python docs/site.py [FOLDER]`, without a folder build/site.

Pages lie where their Markdown lies, so that links need nothing but another ending. Anything amiss (a broken link, a
picture without a description, a page that nothing leads to) is said, and the exit code is 1.
"""

from __future__ import annotations

import re
import shutil
import sys
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from urllib.parse import unquote, urlsplit

from jinja2 import Environment
from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[1]
NAVIGATION = {
    "Start": ("README.md", "docs/quickstart.md", "docs/concepts.md", "docs/faq.md"),
    "Methods": ("docs/choose.md", "docs/methods.md", "docs/papers.md"),
    "Do more": ("docs/extend.md", "docs/faults.md", "docs/machines.md", "docs/deploy.md", "docs/coming-from.md"),
    "Know more": ("docs/privacy.md", "docs/speed.md", "docs/architecture.md", "docs/decisions.md"),
    "Project": ("CONTRIBUTING.md", "docs/release.md", "CHANGELOG.md"),
    "Results": tuple(sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "results").glob("*.md"))),
}
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md", "results/*.md")
TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }} - FedLens</title><link rel="stylesheet" href="{{ up }}docs/site.css"></head><body>
<details class="menu" open><summary>FedLens</summary><nav>{% for group, links in navigation.items() %}
<h2>{{ group }}</h2><ul>{% for link in links %}
<li{% if link.here %} class="here"{% endif %}><a href="{{ link.target }}">{{ link.title }}</a></li>{% endfor %}
</ul>{% endfor %}</nav></details>
<main>{{ body }}</main>
<script>if (innerWidth < 800) document.querySelector(".menu").open = false</script></body></html>
"""


@dataclass
class Page:
    path: str  # of its Markdown, from the root
    tokens: list[Token]
    title: str = ""
    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)  # as they are written

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


def build(out: Path) -> list[str]:
    """Write the site, and say what is amiss with it."""
    markdown = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    pages = {p.path: p for pattern in PAGES for p in (read(path, markdown) for path in sorted(ROOT.glob(pattern)))}
    template = Environment(autoescape=False).from_string(TEMPLATE)
    files = {"docs/site.css"}
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
        text = template.render(title=page.title, body=body, navigation=navigation, up="../" * page.place.count("/"))
        (out / page.place).parent.mkdir(parents=True, exist_ok=True)
        (out / page.place).write_text(text, "utf-8")
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
