"""``python -m minisgl course``: list, start, check and solve the tasks of chapters, and grade assignments."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Sequence
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
    description = "Write the engine chapter by chapter."
    parser = argparse.ArgumentParser(prog="python -m minisgl course", description=description)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], about: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=about)
        command.set_defaults(run=run)
        return command

    add("list", _list, "chapters and their tasks")
    start = add("start", _start, "write the package with the tasks of a chapter left out")
    check = add("check", _check, "run a chapter's tests on your package, task by task")
    for command, folder in ((start, "a new folder"), (check, "the folder that `start` wrote")):
        command.add_argument("chapter", type=int, help="number of the chapter")
        command.add_argument("directory", type=Path, help=folder)
    seconds = "seconds that one test may take (default: %(default)s)"
    check.add_argument("--timeout", type=int, default=SECONDS_PER_TEST, help=seconds)
    hint = add("hint", _hint, "one nudge towards a task")
    for command in (hint, add("solution", _solution, "our functions of one task")):
        command.add_argument("task", nargs="+", help="chapter and number, such as 6.2")
    diff = add("diff", _diff, "what a starter lacks, or how your functions differ from ours")
    diff.add_argument("task", help="a chapter, such as 6, or a task of it, such as 6.2 or 6 2")
    place = "your folder or file, to compare one task with ours"
    diff.add_argument("place", nargs="*", metavar="[NUMBER] [PLACE]", help=place)
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
    no_hint = f"Task {task.id} has no hint yet: its docstrings and the names of its tests say what it is about."
    print(task.hint or no_hint)
    return 0


def _solution(options: argparse.Namespace) -> int:
    sources = _sources()
    for stub, text in sources.solution(sources.table.task(".".join(options.task))).items():
        print(f"# {stub.path}: {stub.name}\n{text}")
    return 0


def _diff(options: argparse.Namespace) -> int:
    sources, name, places = _sources(), options.task, options.place
    if places and name.isdecimal() and places[0].isdecimal():  # 6 2, as the other commands take it
        name, places = f"{name}.{places[0]}", places[1:]
    if len(places) > 1:
        raise CourseError(f"one folder or file can be compared, not {len(places)}: {' '.join(places)}")
    if places and name.isdecimal():
        raise CourseError(f"name one task to compare with {places[0]}, such as {name}.1")
    table = sources.table
    tasks = table.chapter_with_tasks(int(name)).tasks if name.isdecimal() else [table.task(name)]
    lines = sources.difference(tasks[0], Path(places[0])) if places else sources.missing(tasks)
    for line in lines:
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
