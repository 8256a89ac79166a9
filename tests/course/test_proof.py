"""The proof of the course fails where it should."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from minisgl.book.attempts import parameters
from minisgl.book.course_table import Chapter, CourseError, Mutant, Stub, Table, load_table
from minisgl.book.starters import Sources, function_text, functions_of, is_untouched, repository
from tests.course.tasks import task_with
from tools.course import has_tasks_in_its_text, main, prove
from tools.pytest_copies import PytestCopies


def test_no_tasks_are_no_proof() -> None:
    table = load_table()
    bare = Table({number: replace(each, tasks=()) for number, each in table.chapters.items()}, ())
    assert prove(Sources(repository(), bare), [each for each in bare.chapters.values() if each.tasks], []) == [
        "the table has no tasks, so there is nothing to prove"
    ]


def test_a_chapter_without_tasks_is_told_from_one_that_is_not_there() -> None:
    table = load_table()
    bare = Table({**table.chapters, 2: replace(table.chapters[2], tasks=())}, table.reference)
    with pytest.raises(CourseError, match="chapter 2 has no tasks; choose one of 1, 3"):
        bare.chapter_with_tasks(2)


def test_an_unknown_chapter_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["99"]) == 2
    assert "chapter 99 is not in the course" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["six"])
    assert "invalid int value: 'six'" in capsys.readouterr().err


Proof = Callable[[Chapter], list[str]]


@pytest.fixture(scope="module")
def proved_with() -> Iterator[Proof]:
    """What is wrong with one chapter of a table that has it in the place of ours."""

    def proof(chapter: Chapter) -> list[str]:
        table = load_table()
        changed = replace(table, chapters={**table.chapters, chapter.number: chapter})
        return prove(Sources(repository(), changed), [chapter], [copies])

    with PytestCopies() as copies:
        yield proof


def test_a_table_that_is_wrong_is_found_out(proved_with: Proof) -> None:
    """The table of chapter 1 with a test that needs no task, and with one that is not there."""
    one, admit = load_table().chapters[1], task_with("RunningTable.admit")
    needless = "tests/test_registry.py::test_a_name_in_the_table_is_found"
    missing = "tests/test_table.py::test_admission_sets_every_length[of-nothing]"
    problems = proved_with(replace(one, tasks=(replace(admit, number=1, mutants=(), tests=(needless, missing)),)))
    assert problems == [
        f"chapter 1: in the starter, {needless} of task 1 passes",
        f"chapter 1: {missing} of chapter 1, task 1 did not run",
        "chapter 1: task 1 names 0 mistakes; name 2 that its tests notice",
    ]


def test_tasks_in_the_wrong_order_are_found_out(proved_with: Proof) -> None:
    """The first of these needs the second."""
    one = load_table().chapters[1]
    admit, leave = task_with("RunningTable.admit"), task_with("RunningTable.release")
    problems = proved_with(
        replace(one, tasks=(replace(leave, number=1, mutants=()), replace(admit, number=2, mutants=())))
    )
    test = "tests/test_table.py::test_a_slot_in_use_is_not_released"
    assert any(f"in the starter, {test} of task 1 fails" in problem for problem in problems)


def test_a_stub_that_an_import_needs_is_found_out(proved_with: Proof) -> None:
    """`only_default` is called while the server's modules are imported."""
    one = load_table().chapters[1]
    admit, stub = task_with("RunningTable.admit"), Stub("minisgl.server.requests", "only_default")
    problems = proved_with(replace(one, tasks=(replace(admit, number=1, mutants=(), stubs=(*admit.stubs, stub)),)))
    assert any(problem.startswith("chapter 1: the starter cannot be imported: it fails with") for problem in problems)


def test_mistakes_that_no_test_notices_are_found_out(proved_with: Proof) -> None:
    """Of task 2; one that is noticed is no problem, and one that cannot be made ends the proof of the chapter."""
    admit = replace(task_with("RunningTable.admit"), number=1)
    seen = Mutant("self.kv_len[slot] = cached_len", "self.kv_len[slot] = 0", "forgets what is cached")
    unseen = Mutant("return slot", "return int(slot)", "nothing at all")
    one = replace(load_table().chapters[1], tasks=(replace(admit, mutants=(seen, unseen)),))
    assert proved_with(one) == ["chapter 1: no test of task 1 notices 'nothing at all'"]
    absent = replace(one, tasks=(replace(admit, mutants=(Mutant("slot", "table"),)),))
    assert re.search(r"task 1: 'slot' occurs \d\d times in our functions", str(proved_with(absent)))


def test_a_chapter_with_tasks_in_its_text_needs_mistakes(tmp_path: Path) -> None:
    one = load_table().chapters[1]
    (tmp_path / "chapters").mkdir()
    text = tmp_path / "chapters/01-one.md"
    text.write_text("no tasks yet")
    assert not has_tasks_in_its_text(tmp_path, one)
    text.write_text('```python\nyour_turn("1.1")\n```')
    assert has_tasks_in_its_text(tmp_path, one)


# -- tasks in the text of a chapter ------------------------------------------------------------------------------------

FENCE = re.compile(r"^```python(?P<tags>.*?)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def cells(text: str) -> list[tuple[str, str]]:
    """Tags and code of each cell of a chapter."""
    return [(found["tags"], found["code"].strip()) for found in FENCE.finditer(text)]


def called(code: str, name: str) -> list[list[str]]:
    """The arguments of each call of a function in a cell, as they are written."""
    nodes = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call))
    return [[ast.unparse(each) for each in node.args] for node in nodes if ast.unparse(node.func) == name]


def shown(codes: list[str]) -> set[str]:
    """Full names of what cells show, as far as they import it."""
    imported: dict[str, str] = {}
    names = set()
    for code in codes:
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                base = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                imported |= {alias.asname or alias.name: base + alias.name for alias in node.names}
        for first, _, rest in (call[0].partition(".") for call in called(code, "show")):
            names.add(f"{imported.get(first, first)}.{rest}".rstrip("."))
    return names


def text_problems(chapter: Chapter, text: str, sources: Sources, earlier: Mapping[int, str]) -> list[str]:
    """What is wrong with the tasks in the text of a chapter, which comes after ``earlier`` ones, by their numbers."""
    found = cells(text)
    turns = [(place, call[0].strip("'")) for place, (_, code) in enumerate(found) for call in called(code, "your_turn")]
    if not turns:
        return []
    shown_earlier = {number: shown([code for _, code in cells(each)]) for number, each in earlier.items()}
    problems = []
    wanted = [task.id for task in chapter.tasks]
    if [identifier for _, identifier in turns] != wanted:
        problems.append(f"its tasks are {[identifier for _, identifier in turns]}, and in the table {wanted}")
    for place, identifier in turns:
        task = sources.table.task(identifier)
        (_, turn), (tags, stubs), (_, checked) = [*found[place : place + 3], ("", ""), ("", "")][:3]
        if (
            turn.splitlines()[-1] != f'your_turn("{identifier}")'
            or "your-turn" not in tags
            or not called(checked, "check")
        ):
            problems.append(f"{identifier}: your_turn, a cell tagged your-turn and check must follow each other")
            continue
        if called(checked, "check")[0][0].strip("'") != identifier:
            problems.append(f"{identifier}: the check after it is of another task")
        written = {name: function_text(stubs, name) for name, _ in functions_of(stubs)}
        for stub in task.stubs:
            name = stub.name if stub.name in written else stub.last_name
            if name not in written or not is_untouched(written[name]):
                problems.append(f"{identifier}: its cell has no empty function {stub.name}")
                continue
            if parameters(written[name]) != parameters(sources.solution(task)[stub]):
                problems.append(f"{identifier}: {name} takes other parameters than that of the package")
            if (
                name not in called(checked, "check")[0][1:]
                and name.partition(".")[0] not in called(checked, "check")[0]
            ):
                problems.append(f"{identifier}: {name} is not checked")
            parts = stub.name.split(".")
            given_away = {stub.module, f"{stub.module}.{parts[0]}", f"{stub.module}.{stub.name}"}
            if given_away & shown([code for _, code in found[:place]]):
                problems.append(f"{identifier}: {stub.name} is shown before the reader has had a turn")
            for number, names in shown_earlier.items():
                if given_away & names:
                    problems.append(f"{identifier}: {stub.name} is shown in chapter {number} already")
    return problems


@pytest.mark.parametrize(
    "chapter", [each for each in load_table().chapters.values() if each.tasks], ids=lambda each: f"{each.number}"
)
def test_tasks_stand_in_the_text_before_they_are_shown(chapter: Chapter) -> None:
    paths = (repository() / "chapters").glob("[0-9][0-9]-*.md")
    texts = {int(path.name[:2]): path.read_text(encoding="utf-8") for path in sorted(paths)}
    earlier = {number: text for number, text in texts.items() if number < chapter.number}
    assert len(earlier) == chapter.number  # they begin with 0, so none is missing
    assert text_problems(chapter, texts[chapter.number], Sources(repository(), load_table()), earlier) == []


GOOD = """
```python
from minisgl.kvcache.block_hash import BlockHashCache
```

```python
your_turn("7.1")
```

```python tags=["your-turn"]
def lock(self, handle):
    raise NotImplementedError
```

```python
check("7.1", lock)
```

```python
show(BlockHashCache.lock)
```
"""


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("(self, handle)", "(self, handle)", None),
        ("(self, handle)", "(self)", "7.1: lock takes other parameters than that of the package"),
        ('check("7.1"', 'check("7.2"', "7.1: the check after it is of another task"),
        (' tags=["your-turn"]', "", "7.1: your_turn, a cell tagged your-turn and check must follow each other"),
        ("def lock", "def unlock", "7.1: its cell has no empty function BlockHashCache.lock"),
        ("raise NotImplementedError", "return 1", "7.1: its cell has no empty function BlockHashCache.lock"),
        ("7.1", "7.2", "its tasks are ['7.2'], and in the table ['7.1', '7.2']"),
        (
            "import BlockHashCache",
            "import BlockHashCache as Blocks\nshow(Blocks)",
            "7.1: BlockHashCache.lock is shown before the reader",
        ),
    ],
)
def test_a_text_that_gives_a_task_away_is_found_out(old: str, new: str, problem: str | None) -> None:
    seven, both = load_table().chapters[7], task_with("BlockHashCache.lock")
    lock = replace(both, number=1, stubs=both.stubs[:1])
    tasks = (lock,) if "7.2" not in new or "check" in new else (lock, replace(lock, number=2))
    table = replace(load_table(), chapters={**load_table().chapters, 7: replace(seven, tasks=tasks)})
    problems = text_problems(table.chapters[7], GOOD.replace(old, new), Sources(repository(), table), {})
    assert problems == [] if problem is None else any(each.startswith(problem) for each in problems), problems


@pytest.mark.parametrize(
    ("code", "given_away"),
    [
        ("from minisgl.kvcache.block_hash import BlockHashCache\nshow(BlockHashCache.lock)", True),
        ("from minisgl.kvcache import block_hash\nshow(block_hash.BlockHashCache)", True),
        ("from minisgl.kvcache.block_hash import BlockHashCache\nshow(BlockHashCache.match)", False),
    ],
)
def test_an_earlier_chapter_that_gives_a_task_away_is_found_out(code: str, given_away: bool) -> None:
    both = task_with("BlockHashCache.lock")
    seven = replace(load_table().chapters[7], tasks=(replace(both, number=1, stubs=both.stubs[:1]),))
    table = replace(load_table(), chapters={**load_table().chapters, 7: seven})
    earlier = {4: "```python\nshow(BlockHashCache.lock)\n```", 6: f"```python\n{code}\n```"}
    problems = text_problems(seven, GOOD, Sources(repository(), table), earlier)
    assert problems == (["7.1: BlockHashCache.lock is shown in chapter 6 already"] if given_away else [])
