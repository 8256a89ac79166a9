"""The proof that the course works, for every chapter: ``python -m tools.course [CHAPTER ...]``.

- Every module of a chapter's starter can be imported, and each test of a task fails there because a function of the
  chapter is not written.
- With the tasks before it written, each test of a task fails with the message of exactly this task, and passes once it
  is written too: so a reader can go task by task.
- Each mistake that the table names for a task makes a test of the task fail. A chapter whose text has the tasks in it
  names at least two for each.

Two chapters are proved at a time, the longest first. The proof fails if it finds no tasks.
"""

from __future__ import annotations

import argparse
import compileall
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from queue import SimpleQueue

from minisgl.book.checks import link_package, results_of, run_tests
from minisgl.book.course_table import Chapter, CourseError, Mutant, Task, load_table
from minisgl.book.starters import PACKAGE, Files, Sources, repository, with_functions, write
from minisgl.book.supervise import Ended, Result, fits
from tools.pytest_copies import PytestCopies

WORKERS = 2
SECONDS_PER_TEST = 120
MUTANTS = 2
"""How many mistakes a task names at least."""

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
    parser = argparse.ArgumentParser(prog="python -m tools.course", description="Prove that the course works.")
    parser.add_argument("chapters", nargs="*", type=int, help="numbers of chapters; all of them if there are none")
    numbers = parser.parse_args(arguments).chapters
    try:
        sources = Sources(repository(), load_table())
        chapters = [each for each in sources.table.chapters.values() if each.tasks]
        if numbers:
            chapters = [sources.table.chapter_with_tasks(number) for number in numbers]
        with ExitStack() as stack:
            copies = [stack.enter_context(PytestCopies()) for _ in chapters[:WORKERS]]
            problems = prove(sources, chapters, copies)
    except CourseError as error:
        print(f"course: {error}", file=sys.stderr)
        return 2
    for problem in problems:
        print(f"course: {problem}", file=sys.stderr)
    return 1 if problems else 0


def prove(sources: Sources, chapters: Sequence[Chapter], copies: Sequence[PytestCopies]) -> list[str]:
    """What is wrong with the course. As many chapters are proved at a time as there are processes to copy."""
    if not chapters:
        return ["the table has no tasks, so there is nothing to prove"]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="minisgl-proof-")))
        free: SimpleQueue[PytestCopies] = SimpleQueue()
        for each in copies:
            free.put(each)
        pool = stack.enter_context(ThreadPoolExecutor(len(copies)))
        run = partial(run_tests, timeout=SECONDS_PER_TEST, launch=partial(_in_a_copy, free))
        compileall.compile_dir(sources.root / PACKAGE, quiet=2)  # once, and not in each of some hundred processes
        by_length = sorted(chapters, key=lambda chapter: len(chapter.tasks), reverse=True)
        jobs = {
            chapter.number: pool.submit(_prove, sources, chapter, folder / str(chapter.number), run)
            for chapter in by_length
        }
        return [problem for chapter in chapters for problem in jobs[chapter.number].result()]


def _in_a_copy(
    free: SimpleQueue[PytestCopies],
    command: Sequence[str],
    env: Mapping[str, str],
    cwd: Path,
    time_limit: float,
    output_limit: int,
    watch: Callable[[], None],
) -> Ended:
    """A `minisgl.book.supervise.Launch`."""
    process = free.get()
    start = time.monotonic()
    try:
        output = process.run(command[2:], cwd, env, time_limit)
        return Ended(time.monotonic() - start, 0, None, output, len(output), 0)
    except TimeoutError:
        return Ended(time_limit, None, "time", "", 0, 0)
    finally:
        free.put(process)


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
    write({**sources.suite(chapter.tasks), IMPORTS: _IMPORTS_TEXT}, folder)
    link_package(sources.root, folder, sources.modules_of(chapter.tasks, chapter.tasks))
    results = run(folder, [IMPORTS, *(test for task in chapter.tasks for test in task.tests)])
    yield from _imports(results)
    expected: set[str] = set()
    for task in chapter.tasks:
        expected.update(task.messages)
        for result in results_of(task, results):
            if result.stub not in expected:
                yield f"in the starter, {result.test} of task {task.number} {_outcome(result)}"
        yield from _unmatched(task, results)
    for written in range(1, len(chapter.tasks) + 1):
        _write(folder, sources.modules_of(chapter.tasks, chapter.tasks[written:]))
        last_and_next = chapter.tasks[written - 1 : written + 1]
        results = run(folder, [test for task in last_and_next for test in task.tests])
        for task in last_and_next:
            is_next = task.number == written + 1
            for result in results_of(task, results):
                if result.stub not in task.messages if is_next else result.failure is not None:
                    yield f"with {written} tasks written, {result.test} of task {task.number} {_outcome(result)}"
    for task in chapter.tasks:
        if len(task.mutants) < MUTANTS and has_tasks_in_its_text(sources.root, chapter):
            yield f"task {task.number} names {len(task.mutants)} mistakes; name {MUTANTS} that its tests notice"
        for mutant in task.mutants:
            path, text = with_mistake(sources, task, mutant)
            _write(folder, {path: text})
            failed = [each for each in run(folder, task.tests, options=["-x"]) if each.failure is not None]
            if not failed or "took longer" in str(failed[0].failure) or "::" not in failed[0].test:
                how = f"; instead, {failed[0].test} {_outcome(failed[0])}" if failed else ""
                yield f"no test of task {task.number} notices {(mutant.mistake or mutant.wrong)!r}{how}"
            _write(folder, {path: sources.read(path)})


def _write(folder: Path, files: Files) -> None:
    for path, text in files.items():
        (folder / path).write_text(text, encoding="utf-8")


def with_mistake(sources: Sources, task: Task, mutant: Mutant) -> tuple[str, str]:
    """Path and text of the module in which a mistake is, as if a reader had made it.

    Raises `CourseError` if what it changes does not occur exactly once in our functions of the task.
    """
    functions = sources.solution(task)
    found = {stub: text.count(mutant.text) for stub, text in functions.items()}
    if sum(found.values()) != 1:
        raise CourseError(f"task {task.number}: {mutant.text!r} occurs {sum(found.values())} times in our functions")
    (stub,) = (stub for stub, count in found.items() if count)
    wrong = functions[stub].replace(mutant.text, mutant.wrong)
    return stub.path, with_functions(sources.read(stub.path), {stub.name: wrong})


def has_tasks_in_its_text(root: Path, chapter: Chapter) -> bool:
    """Whether a chapter calls ``your_turn``: it is one of those that have been rewritten."""
    texts = (root / "chapters").glob(f"{chapter.number:02d}-*.md")
    return any("your_turn(" in text.read_text(encoding="utf-8") for text in texts)


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
