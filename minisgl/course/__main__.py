"""``python -m minisgl.course``: list, start, check, diff and snapshot chapters, and grade assignments."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from minisgl.course.changes import changes
from minisgl.course.checking import check
from minisgl.course.errors import CourseError
from minisgl.course.grading import add_grade
from minisgl.course.running import SECONDS_PER_TEST
from minisgl.course.sources import Sources, repository
from minisgl.course.table import load_table
from minisgl.course.workspace import snapshot, starter, write
from minisgl.errors import MiniSGLError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        Exit status: 0 if all is well, 1 if a test failed, 2 if the command cannot be carried out.
    """
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
    except MiniSGLError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever reads, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m minisgl.course", description="Write the engine chapter by chapter."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("list", help="chapters and their tasks")
    command.set_defaults(run=_list)

    command = commands.add_parser("start", help="write the package up to a chapter, its tasks left out")
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

    command = commands.add_parser("diff", help="what a chapter adds to the one before")
    command.add_argument("chapter", type=int, help="number of the chapter")
    command.set_defaults(run=_diff)

    command = commands.add_parser("snapshot", help="write the complete package of all chapters up to this one")
    command.add_argument("chapter", type=int, help="number of the chapter")
    command.add_argument("directory", type=Path, help="a new folder")
    command.set_defaults(run=_snapshot)

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
    files = starter(_sources(), options.chapter)
    write(files, options.directory)
    check_it = f"python -m minisgl.course check {options.chapter} {shlex.quote(str(options.directory))}"
    print(f"{options.directory} holds the package up to chapter {options.chapter}; README.md there lists your tasks.")
    print(f"To check what you have written: {check_it}")
    return 0


def _check(options: argparse.Namespace) -> int:
    if options.timeout <= 0:
        raise CourseError(f"--timeout is a number of seconds above 0, not {options.timeout}")
    return 0 if check(_sources(), options.chapter, options.directory, options.timeout) else 1


def _diff(options: argparse.Namespace) -> int:
    for line in changes(_sources(), options.chapter):
        print(line)
    return 0


def _snapshot(options: argparse.Namespace) -> int:
    write(snapshot(_sources(), options.chapter), options.directory)
    print(f"{options.directory} holds the package of chapters 1 to {options.chapter}; run `python -m pytest` there.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
