"""The proof that the course works, for every chapter: ``python -m tools.course [CHAPTER ...]``.

- The starter can be imported, and in it each test of a task fails because a function of its chapter is not written.
- With the tasks before it written, each test of a task fails with the message of exactly this task, and the tests of
  the tasks before pass: so a reader can go task by task.
- The snapshot passes the test suites of all chapters so far on its own, in a folder without the later modules. From
  chapter 10 on, where they take minutes, it passes the tests of its chapter and of all tasks so far, and every test
  file of the chapters before can be imported there.

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

from minisgl.course.errors import CourseError
from minisgl.course.running import Result, fits, results_of, run_tests_of
from minisgl.course.sources import TESTS, Sources, repository
from minisgl.course.table import Chapter, Task, load_table
from minisgl.course.workspace import package_with_stubs, snapshot, starter, write
from tools.pytest_copies import PytestCopies

WHOLE_SUITES = tuple(range(1, 10))
"""Chapters whose snapshots run every test. What those of the last chapters pass is known from `make unit`."""
WORKERS = 2
SECONDS_PER_TEST = 120

Run = Callable[..., list[Result]]
"""`run_tests_of`, with what the proof chooses already chosen."""


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


def prove(sources: Sources, chapters: Sequence[Chapter], whole: Sequence[int] = WHOLE_SUITES) -> list[str]:
    """What is wrong with the course."""
    if not chapters:
        return ["the table has no tasks, so there is nothing to prove"]
    sources.test_files()  # a test file that belongs to no chapter is an error
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="minisgl-proof-")))
        copies: SimpleQueue[PytestCopies] = SimpleQueue()
        for _ in range(WORKERS):
            copies.put(stack.enter_context(PytestCopies()))
        pool = stack.enter_context(ThreadPoolExecutor(WORKERS))
        run = partial(run_tests_of, timeout=SECONDS_PER_TEST, launch=partial(_in_a_copy, copies))
        jobs = [
            pool.submit(_prove_chapter, sources, chapter, folder / str(chapter.number), chapter.number in whole, run)
            for chapter in sorted(chapters, key=lambda each: -each.number)  # the long ones first
        ]
        return [problem for job in reversed(jobs) for problem in job.result()]


def _in_a_copy(
    copies: SimpleQueue[PytestCopies],
    arguments: Sequence[str],
    workplace: Path,
    environment: Mapping[str, str],
    seconds: float,
) -> str:
    """See `minisgl.course.running.Launch`."""
    free = copies.get()
    try:
        return free.run(arguments, workplace, environment, seconds)
    finally:
        copies.put(free)


def _prove_chapter(sources: Sources, chapter: Chapter, folder: Path, whole: bool, run: Run) -> list[str]:
    start = time.perf_counter()
    problems: list[str] = []
    proofs: list[Callable[[], Iterator[str]]] = [
        lambda: _prove_starter(sources, chapter, folder / "starter", run),
        lambda: _prove_tasks(sources, chapter, folder / "tasks", run),
        lambda: _prove_snapshot(sources, chapter, folder / "snapshot", whole, run),
    ]
    for proof in proofs:
        try:
            problems += [f"chapter {chapter.number}: {problem}" for problem in proof()]
        except CourseError as error:
            problems.append(f"chapter {chapter.number}: {error}")
    verdict = f"{len(problems)} problems" if problems else "proved"
    print(f"chapter {chapter.number:2}: {len(chapter.tasks)} tasks, {verdict}, {time.perf_counter() - start:.0f} s")
    return problems


def _prove_starter(sources: Sources, chapter: Chapter, folder: Path, run: Run) -> Iterator[str]:
    write(starter(sources, chapter.number), folder)
    expected: set[str] = set()
    results = run(folder, [test for task in chapter.tasks for test in task.tests])
    for task in chapter.tasks:
        expected.update(task.messages)
        for result in results_of(task, results):
            if result.stub not in expected:
                yield f"in the starter, {result.test} of task {task.number} {_outcome(result)}"
        yield from _unmatched(task, results)


def _prove_tasks(sources: Sources, chapter: Chapter, folder: Path, run: Run) -> Iterator[str]:
    """In one folder, from which only the package changes: with tasks 1 to k - 1 written, task k is next."""
    write(starter(sources, chapter.number), folder)
    for task in chapter.tasks[1:]:
        unwritten = [*chapter.tasks[task.number - 1 :], *sources.table.tasks_from(chapter.number + 1)]
        for path, text in package_with_stubs(sources, chapter.number, unwritten).items():
            (folder / path).write_text(text, encoding="utf-8")
        until_here = chapter.tasks[: task.number]
        results = run(folder, [test for each in until_here for test in each.tests])
        for each in until_here:
            for result in results_of(each, results):
                if each is task and result.stub not in task.messages:
                    yield f"where task {task.number} is next, its {result.test} {_outcome(result)}"
                if each is not task and result.failure is not None:
                    yield f"where task {task.number} is next, {result.test} of task {each.number} {_outcome(result)}"


def _prove_snapshot(sources: Sources, chapter: Chapter, folder: Path, whole: bool, run: Run) -> Iterator[str]:
    write(snapshot(sources, chapter.number), folder)
    tasks = [task for each in sources.table.chapters.values() if each.number <= chapter.number for task in each.tasks]
    own = [path for path in sources.test_files() if sources.chapter_of_test(path) == chapter.number]
    quick = [path for path in own if path not in chapter.slow]
    chosen = [TESTS] if whole else [*quick, *(test for task in tasks for test in task.tests)]
    results = run(folder, chosen)
    for result in results:
        if result.failure is not None:
            yield f"in the snapshot, {result.test} {_outcome(result)}"
    for task in tasks:
        yield from _unmatched(task, results)
    if not whole:
        for result in run(folder, [TESTS], options=["--collect-only"]):  # only what cannot be is reported
            yield f"in the snapshot, {result.test} cannot be imported: {_outcome(result)}"


def _unmatched(task: Task, results: Sequence[Result]) -> Iterator[str]:
    for test in task.tests:
        if not any(fits(result.test, test) for result in results):
            yield f"{test} of chapter {task.chapter}, task {task.number} did not run"


def _outcome(result: Result) -> str:
    return "passes" if result.failure is None else f"fails with {result.failure.strip().splitlines()[-1][:200]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
