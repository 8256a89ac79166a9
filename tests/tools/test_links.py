from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.links import chapter_problems, site_problems

ROOT = Path(__file__).parents[2]


def test_the_book_names_nothing_that_is_not_there() -> None:
    assert chapter_problems(ROOT) == []


def test_every_difference_has_a_chapter() -> None:
    """The last column of each row links to where it is worked out; that the file is there, the test above holds."""
    lines = (ROOT / "chapters" / "differences.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("|") and not re.match(r"\| what \||\|---", line)]
    assert len(rows) > 40
    assert [row for row in rows if not re.search(r"\| (\[\d+\]\(\d\d-[\w-]+\.md\)(, )?)+ \|$", row)] == []


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository with a package, a test and no chapter yet."""
    for name in ("chapters", "minisgl/server", "tests/kvcache"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "minisgl" / "batch.py").write_text("")
    (tmp_path / "tests" / "kvcache" / "test_pool.py").write_text("def test_alloc(): ...\n\nclass TestPool: ...\n")
    (tmp_path / "chapters" / "SUMMARY.md").write_text("[A](00-a.md)\n")
    return tmp_path


def problems(root: Path, text: str) -> list[str]:
    (root / "chapters" / "00-a.md").write_text(text)
    return chapter_problems(root)


@pytest.mark.parametrize(
    "text",
    [
        "`minisgl/batch.py`, `minisgl/server`, `tests/kvcache/`, `minisgl/*/x.py`, `n // page_size`, `my_order.py`",
        "`tests/kvcache/test_pool.py::test_alloc`, `tests/kvcache/test_pool.py::TestPool`",
        "`tests/kvcache/test_pool.py::test_alloc[4-True]`",
        "[a](../minisgl/batch.py) [b](00-a.md#there) [c](#here) [d](https://example.org/minisgl/x.py)",
        "~~~bash\npython -m pytest tests/kvcache -k 'not slow' ../tests/kvcache/test_pool.py\n~~~\n",
        "```python\nopen('tests/not_yet.py')  # `tests/not_yet.py` [x](y.md)\n```\n",
    ],
)
def test_what_is_there_may_be_named(root: Path, text: str) -> None:
    assert problems(root, text) == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("`minisgl/core/gone.py`", "there is no minisgl/core/gone.py"),
        ("`../tests/gone/`", "there is no tests/gone"),
        ("`tests/kvcache/test_pool.py::test_all`", "tests/kvcache/test_pool.py has no test_all"),
        ("[a](../minisgl/gone.py)", "the link to ../minisgl/gone.py is dead"),
        ("[a](01-b.md#there)", "the link to 01-b.md is dead"),
        ("~~~bash\npython -m pytest tests/gone.py\n~~~\n", "there is no tests/gone.py"),
    ],
)
def test_what_is_not_there_is_reported(root: Path, text: str, told: str) -> None:
    assert problems(root, text) == [f"chapters/00-a.md: {told}"]


def test_a_chapter_that_no_list_has(root: Path) -> None:
    (root / "chapters" / "00-a.md").write_text("")
    (root / "chapters" / "01-b.md").write_text("")
    assert chapter_problems(root) == ["chapters/01-b.md: not in SUMMARY.md, so not in the book"]


def test_mdbook_counts_the_chapters_as_their_names_do(root: Path) -> None:
    for name in ("00-a.md", "01-b.md", "03-d.md"):
        (root / "chapters" / name).write_text("")
    summary = root / "chapters" / "SUMMARY.md"
    summary.write_text("[A](00-a.md)\n\n- [B](01-b.md)\n- [C]()\n- [D](03-d.md)\n")
    assert chapter_problems(root) == []
    summary.write_text("[A](00-a.md)\n\n- [B](01-b.md)\n- [D](03-d.md)\n")
    assert chapter_problems(root) == ["chapters/SUMMARY.md: 03-d.md is number 2 there"]


PAGE = """<link href="x.css"><h1 id="top">A</h1><a name="old"></a><a href="b.html#in%20it">b</a>
<a href="#top">up</a><a href="#old">up</a><a href="https://example.org">away</a><a href="mailto:a@b.c">write</a>
<a href="../minisgl/core.py">a file of the repository</a><img src="data:image/png;base64,AA=="><svg><rect/></svg>
<script src="x.js"></script>"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Two sound pages."""
    made = tmp_path / "site"
    made.mkdir()
    (made / "a.html").write_text(PAGE)
    (made / "b.html").write_text('<p id="in it">')
    for name in ("x.css", "x.js"):
        (made / name).write_text("")
    return made


def test_a_sound_site(site: Path) -> None:
    assert site_problems(site) == []


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("b.html#", "c.html#", "the link to c.html#in%20it is dead"),
        ("in%20it", "out", "the link to b.html#out is dead: that page has no such heading"),
        ('"#top"', '"#bottom"', "the link to #bottom is dead: that page has no such heading"),
        ("x.css", "y.css", "the link to y.css is dead"),
        ("x.js", "y.js", "the link to y.js is dead"),
        ("data:image/png;base64,AA==", "p.svg", "the link to p.svg is dead"),
        ("x.js", "https://example.org/x.js", "https://example.org/x.js is loaded from the network"),
        ("x.css", "//example.org/x.css", "//example.org/x.css is loaded from the network"),
    ],
)
def test_what_a_page_must_not_have(site: Path, before: str, after: str, told: str) -> None:
    (site / "a.html").write_text(PAGE.replace(before, after))
    assert site_problems(site) == [f"a.html: {told}"]


def test_no_site_is_a_problem(tmp_path: Path) -> None:
    assert site_problems(tmp_path) == [f"{tmp_path}: no page was built"]
