from __future__ import annotations

from pathlib import Path

import pytest

from tools.glossary import bold_terms, glossary_problems

CHAPTERS = Path(__file__).parents[2] / "chapters"
GLOSSARY = (
    "# Glossary\n\n### KV cache\n\nKept. *[Chapter 1](01-a.md).*\n\n### page\n\nA block. *[Chapter 1](01-a.md).*\n"
)


def test_the_glossary_and_the_chapters_agree() -> None:
    assert glossary_problems(CHAPTERS) == []


def test_headings_of_paragraphs_code_and_predictions_are_no_terms() -> None:
    text = "A **KV\ncache** of **pages**. **Predict:** how many? **Memory.** `a**2 * b**2` **Predict**\n"
    text += "```python\nx**y**z\n```\n"
    assert bold_terms(text) == ["KV cache", "pages"]


@pytest.mark.parametrize(
    ("chapter", "problems"),
    [
        ("The **KV cache** has **pages**. **A sentence in bold** is none.", []),
        ("No term.", []),
        ("A **page**.", ["chapters/glossary.md: 'KV cache' names 01-a.md, where it is not bold"]),
        (
            "The **KV cache** has **pages** and **slots**.",
            [
                "chapters/01-a.md: the term 'slots' is not in glossary.md: explain it there, or "
                "write it without the bold"
            ],
        ),
    ],
)
def test_what_one_of_them_lacks_is_told(tmp_path: Path, chapter: str, problems: list[str]) -> None:
    (tmp_path / "glossary.md").write_text(GLOSSARY)
    (tmp_path / "01-a.md").write_text(chapter)
    assert glossary_problems(tmp_path) == problems


def test_a_term_without_a_link_is_told(tmp_path: Path) -> None:
    (tmp_path / "glossary.md").write_text(f"{GLOSSARY}\n### slot\n\nA row. *Chapter 1.*\n")
    (tmp_path / "01-a.md").write_text("The **KV cache** has **pages** and **slots**.")
    assert glossary_problems(tmp_path) == [
        "chapters/glossary.md: 'slot' has no link to the chapter that explains it: add one"
    ]


def test_terms_are_in_order(tmp_path: Path) -> None:
    entry = "### {}\n\n*[Chapter 1](01-a.md).*\n"
    (tmp_path / "glossary.md").write_text(f"{entry.format('page')}\n{entry.format('KV cache')}")
    assert glossary_problems(tmp_path) == ["chapters/glossary.md: the terms are not in the order of the alphabet"]
