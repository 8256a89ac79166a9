"""Nothing in the book points at what is not there: files and tests that chapters name, links and pictures of pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

FENCE = re.compile(
    r"^(?P<fence>~~~|```)(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=fence)[ ]*$", re.DOTALL | re.MULTILINE
)
_CODE_SPAN = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\((?!\w+:|#)(?P<target>[^)\s#]+)")
_FILE = re.compile(
    r"(?:\.\./)?(?P<path>(?:assignments|benchmarks|chapters|minisgl|notebooks|tests|tools)/[\w./-]*\w)"
    r"(?:::(?P<name>\w+))?(?:\[.*\])?/?"
)
_LISTED = re.compile(r"^- \[[^\]]*\]\((?P<name>[^)]*)\)", re.MULTILINE)
_SHELLS = ("bash", "sh")


def chapter_problems(root: Path) -> list[str]:
    """What the prose and the shell examples of chapters name and the repository does not have, in sentences.

    And which chapters have another number in the list, whose items mdBook counts. A chapter to be written is listed
    without a file.
    """
    summary = (root / "chapters" / "SUMMARY.md").read_text(encoding="utf-8")
    listed = _LISTED.findall(summary)
    problems = [
        f"chapters/SUMMARY.md: {name} is number {number} there"
        for number, name in enumerate(listed, start=1)
        if name and not name.startswith(f"{number:02}-")
    ]
    for path in sorted((root / "chapters").glob("*.md")):
        found = missing(path.read_text(encoding="utf-8"), root)
        problems += [f"chapters/{path.name}: {problem}" for problem in found]
        listed_or_part = f"({path.name})" in summary or re.fullmatch(r"part-\d\.md", path.name)
        if path.name != "SUMMARY.md" and not listed_or_part:
            problems.append(f"chapters/{path.name}: not in SUMMARY.md, so not in the book")
    return problems


def missing(text: str, root: Path) -> Iterator[str]:
    """What a chapter's ``text`` names and the repository at ``root`` does not have."""
    prose = FENCE.sub("", text)
    for target in _LINK.findall(prose):
        if not (root / "chapters" / unquote(target)).exists():
            yield f"the link to {target} is dead"
    shell = " ".join(fence["code"] for fence in FENCE.finditer(text) if fence["language"] in _SHELLS)
    for word in [*_CODE_SPAN.findall(prose), *shell.split()]:
        if (named := _FILE.fullmatch(word)) is None:
            continue
        path = root / named["path"]
        if not path.exists():
            yield f"there is no {named['path']}"
        elif named["name"] and not re.search(rf"\b(def|class) {named['name']}\b", path.read_text(encoding="utf-8")):
            yield f"{named['path']} has no {named['name']}"


class _Page(HTMLParser):
    """What a page offers to links, and what it asks for."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.anchors.update(filter(None, [given.get("id"), given.get("name") if tag == "a" else None]))
        if tag == "a":
            self.links += filter(None, [given.get("href")])
        else:
            self.loaded += filter(None, [given.get("src"), given.get("href") if tag == "link" else None])


def site_problems(site: Path) -> list[str]:
    """Dead links and anchors of the built pages, missing pictures, and what would be fetched from a network."""
    pages = {path.resolve(): _Page(path) for path in sorted(site.rglob("*.html"))}
    problems = [] if pages else [f"{site}: no page was built"]
    for path, page in pages.items():
        problems += [f"{path.name}: {problem}" for problem in _dead(path, page, pages, site.resolve())]
    return problems


def _dead(path: Path, page: _Page, pages: dict[Path, _Page], site: Path) -> Iterator[str]:
    for url in dict.fromkeys([*page.loaded, *page.links]):
        parts = urlsplit(url)
        if parts.scheme == "data" or (parts.scheme and url in page.links):
            continue
        if parts.scheme or parts.netloc:
            yield f"{url} is loaded from the network"
            continue
        file, anchor = urldefrag(url)
        target = (path.parent / unquote(file)).resolve() if file else path
        if not target.is_relative_to(site):
            continue  # a file of the repository: `chapter_problems` looks after those
        if not target.exists():
            yield f"the link to {url} is dead"
        elif anchor and target in pages and unquote(anchor) not in pages[target].anchors:
            yield f"the link to {url} is dead: that page has no such heading"
