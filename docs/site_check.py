"""Flaws of the built site: links within it that lead nowhere, pictures without description, headings that leave out a
level, pages without language, and pages and pictures that are too large.
"""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

PAGE_BYTES = 500_000
"""Size above which a page is reported."""
IMAGE_BYTES = 300_000
"""Size above which a picture is reported."""
WRITTEN_BY_SPHINX = ("genindex.html", "py-modindex.html", "search.html")
"""Pages of which only the links are checked, since the theme writes them."""


class _Page(HTMLParser):
    """The links, anchors, pictures and headings of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.pictures: dict[str, str] = {}
        self.headings: list[int] = []
        self.language = ""
        self.bytes = path.stat().st_size
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors.add(values.get("id", ""))
        if tag in ("a", "link") and "href" in values:
            self.links.append(values["href"])
        elif tag in ("img", "script") and "src" in values:
            self.links.append(values["src"])
        if tag == "img":
            self.pictures[values.get("src", "")] = values.get("alt", "")
        elif tag == "html":
            self.language = values.get("lang", "")
        elif len(tag) == 2 and tag[0] == "h" and tag[1].isdigit():
            self.headings.append(int(tag[1]))


def problems(site: Path) -> Iterator[str]:
    """Yield what is wrong with the pages of a built site.

    Parameters
    ----------
    site : Path
        The folder with ``index.html``.

    Yields
    ------
    str
        The page, and what is wrong with it.
    """
    site = site.resolve()
    pages = {path: _Page(path) for path in sorted(site.rglob("*.html")) if "_static" not in path.parts}
    for path, page in pages.items():
        own = path.name not in WRITTEN_BY_SPHINX
        found = [*_broken_links(path, pages), *(_flaws(page) if own else ())]
        yield from (f"{path.relative_to(site)}: {problem}" for problem in found)
    for picture in sorted((site / "_images").glob("*")):
        if picture.stat().st_size > IMAGE_BYTES:
            yield f"{picture.relative_to(site)}: {picture.stat().st_size:,} bytes, more than {IMAGE_BYTES:,}"


def _broken_links(path: Path, pages: dict[Path, _Page]) -> Iterator[str]:
    for link in dict.fromkeys(pages[path].links):
        parts = urlsplit(link)
        if parts.scheme or parts.netloc:
            continue
        goal = (path.parent / unquote(parts.path)).resolve() if parts.path else path
        anchor = unquote(parts.fragment)
        if not goal.exists() or (anchor and goal in pages and anchor not in pages[goal].anchors):
            yield f"link {link} leads nowhere"


def _flaws(page: _Page) -> Iterator[str]:
    for source, description in page.pictures.items():
        if not description or description.endswith((".png", ".svg", ".jpg")):
            yield f"picture {source} has no description"
    if page.headings.count(1) != 1 or page.headings[:1] != [1]:
        yield "the first heading, and no other one, has to be of the first level"
    if any(below > above + 1 for above, below in zip(page.headings, page.headings[1:], strict=False)):
        yield f"a level of headings is left out: {page.headings}"
    if not page.language:
        yield "no language is set"
    if page.bytes > PAGE_BYTES:
        yield f"{page.bytes:,} bytes, more than {PAGE_BYTES:,}"
