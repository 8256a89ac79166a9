"""The proof that the course works, for every chapter: ``python -m tools.course [CHAPTER ...]``.

- Every module of a chapter's starter can be imported, and each test of a task fails there because a function of the
  chapter is not written.
- With the tasks before it written, each test of a task fails with the message of exactly this task, and the tests of
  the tasks before pass: so a reader can go task by task.
- With all tasks written, all their tests pass.

Two chapters are proved at a time. The proof fails if it finds no tasks.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from minisgl.book.checks import Result, fits, results_of, run_tests
from minisgl.book.course_table import Chapter, CourseError, Task, load_table
from minisgl.book.starters import Sources, repository, write
from tools.pytest_copies import PytestCopies

WORKERS = 2
SECONDS_PER_TEST = 120

IMPORTS = "tests/test_imports_of_the_starter.py"
"""A test that the proof adds to a starter: it imports every module, but for what this machine has not installed."""
_IMPORTS_TEXT = """
import importlib
import pkgutil

import minisgl


def test_imports():
    for module in pkgutil.walk_packages(minisgl.__path__, "minisgl."):
        if not module.name.endswith("__main__"):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                assert not error.name.startswith("minisgl"), error
"""

Run = Callable[..., list[Result]]
"""`run_tests`, with what the proof chooses already chosen."""


def main(arguments: Sequence[str]) -> int:
    """Prove some chapters, or all; the exit status is 1 if anything is wrong, 2 if nothing can be proved."""
    try:
        sources = Sources(repository(), load_table())
        chapters = [each for each in sources.table.chapters.values() if each.tasks]
        if arguments:
            chapters = [sources.table.chapter_with_tasks(int(argument)) for argument in arguments]
        problems = prove(sources, chapters)
    except CourseError as error:
        print(f"course: {error}", file=sys.stderr)
        return 2
    for problem in problems:
        print(f"course: {problem}", file=sys.stderr)
    return 1 if problems else 0


def prove(sources: Sources, chapters: Sequence[Chapter]) -> list[str]:
    """What is wrong with the course."""
    if not chapters:
        return ["the table has no tasks, so there is nothing to prove"]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="minisgl-proof-")))
        copies: SimpleQueue[PytestCopies] = SimpleQueue()
        for _ in range(WORKERS):
            copies.put(stack.enter_context(PytestCopies()))
        pool = stack.enter_context(ThreadPoolExecutor(WORKERS))
        run = partial(run_tests, timeout=SECONDS_PER_TEST, launch=partial(_in_a_copy, copies))
        jobs = [pool.submit(_prove, sources, chapter, folder / str(chapter.number), run) for chapter in chapters]
        return [problem for job in jobs for problem in job.result()]


def _in_a_copy(
    copies: SimpleQueue[PytestCopies],
    arguments: Sequence[str],
    workplace: Path,
    environment: Mapping[str, str],
    seconds: float,
) -> str:
    """A `minisgl.book.checks.Launch`."""
    free = copies.get()
    try:
        return free.run(arguments, workplace, environment, seconds)
    finally:
        copies.put(free)


def _prove(sources: Sources, chapter: Chapter, folder: Path, run: Run) -> list[str]:
    start = time.perf_counter()
    try:
        problems = [f"chapter {chapter.number}: {problem}" for problem in _problems(sources, chapter, folder, run)]
    except CourseError as error:
        problems = [f"chapter {chapter.number}: {error}"]
    verdict = f"{len(problems)} problems" if problems else "proved"
    print(f"chapter {chapter.number:2}: {len(chapter.tasks)} tasks, {verdict}, {time.perf_counter() - start:.0f} s")
    return problems


def _problems(sources: Sources, chapter: Chapter, folder: Path, run: Run) -> Iterator[str]:
    """All in one folder, in which one task after the other is written."""
    write({**sources.starter(chapter.number), IMPORTS: _IMPORTS_TEXT}, folder)
    results = run(folder, [IMPORTS, *(test for task in chapter.tasks for test in task.tests)], package=folder)
    yield from _imports(results)
    expected: set[str] = set()
    for task in chapter.tasks:
        expected.update(task.messages)
        for result in results_of(task, results):
            if result.stub not in expected:
                yield f"in the starter, {result.test} of task {task.number} {_outcome(result)}"
        yield from _unmatched(task, results)
    for written in range(1, len(chapter.tasks) + 1):
        for path, text in sources.modules_of(chapter.tasks, chapter.tasks[written:]).items():
            (folder / path).write_text(text, encoding="utf-8")
        until_next = chapter.tasks[: written + 1]
        results = run(folder, [test for task in until_next for test in task.tests], package=folder)
        for task in until_next:
            is_next = task.number == written + 1
            for result in results_of(task, results):
                if result.stub not in task.messages if is_next else result.failure is not None:
                    yield f"with {written} tasks written, {result.test} of task {task.number} {_outcome(result)}"


def _imports(results: Sequence[Result]) -> Iterator[str]:
    found = [result for result in results if fits(result.test, IMPORTS)]
    if not found:
        yield "it is not known whether the starter can be imported"
    yield from (f"the starter cannot be imported: it {_outcome(each)}" for each in found if each.failure is not None)


def _unmatched(task: Task, results: Sequence[Result]) -> Iterator[str]:
    for test in task.tests:
        if not any(fits(result.test, test) for result in results):
            yield f"{test} of chapter {task.chapter}, task {task.number} did not run"


def _outcome(result: Result) -> str:
    return "passes" if result.failure is None else f"fails with {result.failure.strip().splitlines()[-1][:200]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
