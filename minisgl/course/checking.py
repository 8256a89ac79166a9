"""``check``: a chapter's tests on a reader's package, task by task, and what to do next."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from minisgl.course.running import Result, results_of, run_tests
from minisgl.course.sources import Sources
from minisgl.course.stubs import line_of
from minisgl.course.table import Chapter, Task
from minisgl.course.workspace import find_package, suite_until


def check(sources: Sources, number: int, directory: Path, timeout: int) -> bool:
    """Print what is done and what is next; True if everything is done.

    Args:
        sources: the checkout whose tests are run; the folder's own copies may have been changed.
        number: of the chapter.
        directory: the reader's.
        timeout: seconds that one test may take.

    Raises:
        CourseError: there is nothing to check.
    """
    chapter = sources.table.chapter_with_tasks(number)
    find_package(directory, chapter)
    files = suite_until(sources, number)
    wanted = [test for task in chapter.tasks for test in task.tests]
    results = run_tests(files, directory, wanted, timeout)
    print(f"Chapter {number}, {chapter.title}: {directory}")
    for task in chapter.tasks:
        print(f"  task {task.number}  {task.title:<60} {_verdict(chapter, task, results_of(task, results))}")
    for task in chapter.tasks:
        failed = [result for result in results_of(task, results) if result.failure is not None]
        if failed:
            print("\n" + _advice(chapter, task, failed[0], directory))
            return False
    return _check_rest(sources, chapter, directory, timeout)


def _check_rest(sources: Sources, chapter: Chapter, directory: Path, timeout: int) -> bool:
    """All the chapter's tests, once its tasks are done."""
    paths = [path for path in sources.test_files() if sources.chapter_of_test(path) == chapter.number]
    if not paths:
        print("All tasks are done.")
        return True
    results = run_tests(suite_until(sources, chapter.number), directory, paths, timeout)
    failed = [result for result in results if result.failure is not None]
    print(f"  all tests of the chapter: {len(results) - len(failed)} of {len(results)} pass")
    if failed:
        print("\n" + _report(failed[0], directory))
    else:
        print("All tasks are done.")
    return not failed


def _verdict(chapter: Chapter, task: Task, results: Sequence[Result]) -> str:
    failed = [result for result in results if result.failure is not None]
    if not failed:
        return f"passed ({len(results)} {'test' if len(results) == 1 else 'tests'})"
    met = next((each for each in chapter.tasks if _stub_met(each, failed)), None)
    if met is None:
        return f"FAILED ({len(failed)} of {len(results)} tests)"
    return "not written yet" if met == task else f"needs task {met.number}"


def _stub_met(task: Task, failed: Sequence[Result]) -> bool:
    return any(result.stub in task.messages for result in failed)


def _advice(chapter: Chapter, task: Task, result: Result, directory: Path) -> str:
    """What a reader should do about the first failure."""
    for each in chapter.tasks:
        for stub in each.stubs:
            if result.stub == each.message(stub):
                path = directory / stub.path
                line = line_of(path.read_text(encoding="utf-8"), stub.name) if path.is_file() else None
                return (
                    f"Next, task {each.number}, {each.title}: write {stub.name} in {path}"
                    f"{f', line {line}' if line else ''}.\nThe first test that needs it is {result.test}."
                )
    functions = "".join(f"\n    {stub.name} in {directory / stub.path}" for stub in task.stubs)
    return f"Task {task.number}, {task.title}, is about{functions}\n\n{_report(result, directory)}"


def _report(result: Result, directory: Path) -> str:
    alone = f"cd {shlex.quote(str(directory))} && python -m pytest {shlex.quote(result.test)}"
    details = result.details.strip().replace("\n", "\n    ")
    return f"The first failure is {result.test}:\n\n    {details}\n\nTo see it alone:\n\n    {alone}"
