"""A reader's attempt at a task, in a notebook: what to write, and what became of it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from minisgl.book.course_table import Task, load_table
from minisgl.book.tables import Markdown

NOT_WRITTEN = "not written yet: the chapter goes on with ours"


def your_turn(identifier: str) -> Markdown:
    """What the reader writes for a task such as ``"6.2"``, and where more help is."""
    task = load_table().task(identifier)
    names = ", ".join(f"`{stub.name}` in `{stub.path}`" for stub in task.stubs)
    parts = [
        f"**Your turn {task.id}: {task.title}**",
        task.spec,
        f"You write {names}.",
        f"A hint: `python -m minisgl course hint {task.id}`. The whole package without this chapter's functions: "
        f"`python -m minisgl course start {task.chapter} FOLDER`.",
    ]
    return Markdown("\n\n".join(part for part in parts if part))


def check(identifier: str, *functions: Callable[..., Any]) -> None:
    """Run a task's tests with the reader's functions in place of the package's, and print what became of them."""
    task: Task = load_table().task(identifier)
    if all(is_untouched(textwrap.dedent(inspect.getsource(each))) for each in functions):
        print(f"{task.id} {NOT_WRITTEN}")
        return
    raise NotImplementedError("grading in a notebook is on its way; `python -m minisgl course check` does it today")


def is_untouched(source: str) -> bool:
    """Whether a function has a docstring at most, and then ``raise NotImplementedError``, ``...`` or ``pass``."""
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return all(_says_nothing(statement) for statement in body)


def _says_nothing(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Raise):
        raised = statement.exc.func if isinstance(statement.exc, ast.Call) else statement.exc
        return isinstance(raised, ast.Name) and raised.id == "NotImplementedError"
    is_dots = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return isinstance(statement, ast.Pass) or is_dots
