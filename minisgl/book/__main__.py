"""``python -m minisgl course``: list, start, check and solve the tasks of chapters, and grade assignments."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from minisgl.book.checks import SECONDS_PER_TEST, check
from minisgl.book.course_table import CourseError, load_table
from minisgl.book.grading import add_grade
from minisgl.book.starters import Sources, repository, write
from minisgl.errors import MiniSGLError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        Exit status: 0 if all is well, 1 if a test failed, 2 if the command cannot be carried out.
    """
    options = _parser().parse_args(argv)
    try:
        status: int = options.run(options)
    except MiniSGLError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m minisgl course", description="Write the engine chapter by chapter."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("list", help="chapters and their tasks")
    command.set_defaults(run=_list)

    command = commands.add_parser("start", help="write the package with the tasks of a chapter left out")
    command.add_argument("chapter", type=int, help="number of the chapter")
    command.add_argument("directory", type=Path, help="a new folder")
    command.set_defaults(run=_start)

    command = commands.add_parser("check", help="run a chapter's tests on your package, task by task")
    command.add_argument("chapter", type=int, help="number of the chapter")
    command.add_argument("directory", type=Path, help="the folder that `start` wrote")
    command.add_argument(
        "--timeout", type=int, default=SECONDS_PER_TEST, help="seconds that one test may take (default: %(default)s)"
    )
    command.set_defaults(run=_check)

    command = commands.add_parser("hint", help="one nudge towards a task")
    command.add_argument("task", nargs="+", help="chapter and number, such as 6.2")
    command.set_defaults(run=_hint)

    command = commands.add_parser("solution", help="our functions of one task")
    command.add_argument("task", nargs="+", help="chapter and number, such as 6.2")
    command.set_defaults(run=_solution)

    command = commands.add_parser("diff", help="what a starter lacks, or how your functions differ from ours")
    command.add_argument("task", help="a chapter, such as 6, or a task of it, such as 6.2")
    command.add_argument("place", nargs="?", type=Path, help="your folder or file, to compare one task with ours")
    command.set_defaults(run=_diff)

    add_grade(commands)
    return parser


def _sources() -> Sources:
    return Sources(repository(), load_table())


def _list(options: argparse.Namespace) -> int:
    for chapter in load_table().chapters.values():
        print(f"{chapter.number:2}  {chapter.title}")
        for task in chapter.tasks:
            print(f"      {task.number}. {task.title}: {', '.join(stub.name for stub in task.stubs)}")
    return 0


def _start(options: argparse.Namespace) -> int:
    write(_sources().starter(options.chapter), options.directory)
    check_it = f"python -m minisgl course check {options.chapter} {shlex.quote(str(options.directory))}"
    print(f"{options.directory} holds the package without chapter {options.chapter}'s tasks; its README.md lists them.")
    print(f"To check what you have written: {check_it}")
    return 0


def _check(options: argparse.Namespace) -> int:
    if options.timeout <= 0:
        raise CourseError(f"--timeout is a number of seconds above 0, not {options.timeout}")
    return 0 if check(_sources(), options.chapter, options.directory, options.timeout) else 1


def _hint(options: argparse.Namespace) -> int:
    task = load_table().task(".".join(options.task))
    print(
        task.hint or f"Task {task.id} has no hint yet: its docstrings and the names of its tests say what it is about."
    )
    return 0


def _solution(options: argparse.Namespace) -> int:
    sources = _sources()
    for stub, text in sources.solution(sources.table.task(".".join(options.task))).items():
        print(f"# {stub.path}: {stub.name}\n{text}")
    return 0


def _diff(options: argparse.Namespace) -> int:
    sources = _sources()
    if options.task.isdecimal() and options.place is not None:
        raise CourseError(f"name one task to compare with {options.place}, such as {options.task}.1")
    if options.task.isdecimal():
        lines = sources.missing(sources.table.chapter_with_tasks(int(options.task)).tasks)
    elif options.place is None:
        lines = sources.missing([sources.table.task(options.task)])
    else:
        lines = sources.difference(sources.table.task(options.task), options.place)
    for line in lines:
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
