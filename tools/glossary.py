"""Whether the glossary has the terms that chapters introduce in bold, and whether chapters introduce what it has."""

from __future__ import annotations

import re
from pathlib import Path

from tools.links import FENCE

_CODE = re.compile(r"`[^`\n]*`")
_BOLD = re.compile(r"\*\*([^*]+)\*\*")
_ENTRY = re.compile(r"^### (?P<term>.+)\n\n(?P<text>(?:.+\n)+)", re.MULTILINE)
_CHAPTER = re.compile(r"\((?P<file>\d\d-[\w-]+\.md)\)")
_TERM = re.compile(r"[a-z]|\w*[A-Z]\w*[A-Z]")
"""How a term begins; a bold sentence, or the heading of a paragraph, begins with one capital or ends with a sign."""


def glossary_problems(chapters: Path) -> list[str]:
    """What chapters and ``glossary.md`` do not agree about, in sentences. A chapter without bold terms has no say."""
    entries = {entry["term"]: entry["text"] for entry in _ENTRY.finditer((chapters / "glossary.md").read_text("utf-8"))}
    known = {_plain(term) for term in entries}
    bold = {path.name: bold_terms(path.read_text("utf-8")) for path in sorted(chapters.glob("[0-9][0-9]-*.md"))}
    problems = [
        f"chapters/{name}: the term {term!r} is not in glossary.md: explain it there, or write it without the bold"
        for name, terms in bold.items()
        for term in terms
        if _TERM.match(term) and _plain(term) not in known
    ]
    for term, text in entries.items():
        files = _CHAPTER.findall(text)
        if not files:
            problems.append(f"chapters/glossary.md: {term!r} has no link to the chapter that explains it: add one")
        for file in files:
            said = {_plain(each) for each in bold.get(file, ())}
            if said & known and _plain(term) not in said:
                problems.append(f"chapters/glossary.md: {term!r} names {file}, where it is not bold")
    if list(entries) != sorted(entries, key=str.lower):
        problems.append("chapters/glossary.md: the terms are not in the order of the alphabet")
    return problems


def bold_terms(text: str) -> list[str]:
    """What stands in bold in a chapter's prose, but for headings of paragraphs, which end with a sign."""
    prose = _CODE.sub("", FENCE.sub("", text))
    found = (" ".join(words.split()) for words in _BOLD.findall(prose))
    return [words for words in found if words[-1:].isalnum() and words != "Predict"]


def _plain(term: str) -> str:
    """Without capitals and without the plural's s."""
    return term.lower().removesuffix("s")
