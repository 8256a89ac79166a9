"""A reader's attempt at a task, in a notebook: what to write, and what became of it."""

from __future__ import annotations

import ast
import builtins
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import minisgl
from minisgl.book.checks import check_functions, in_words
from minisgl.book.course_table import CourseError, Stub, Task, load_table
from minisgl.book.starters import Sources, functions_of, is_untouched, outline, repository, with_functions
from minisgl.book.tables import WithCode

TOY = "minisgl.book.toy"
OWN_TOY = Path("toy.py")  # the reader's toy engine, in the folder of the notebook

Functions = dict[Stub, FunctionType]


def your_turn(identifier: str) -> WithCode:
    """What the reader writes for a task such as ``"6.2"``, what its tests are called, and where more help is."""
    task = load_table().task(identifier)
    sources = Sources(Path(minisgl.__file__).parents[1], load_table())
    outlines = []
    for stub in task.stubs:
        owner = stub.name.rpartition(".")[0]
        place = f"a method of {owner} in {stub.path}" if owner else f"in {stub.path}"
        outlines.append(f"# {place}\n{outline(sources.read(stub.path), stub.name)}")
    tests = "; ".join(dict.fromkeys(in_words(test.partition("[")[0]) for test in task.tests))
    code = "```python\n" + "\n\n".join(outlines) + "\n```"
    more = (
        f"A hint: `python -m minisgl course hint {task.id}`. Ours is folded below the check. The whole package without "
        f"this chapter's functions: `python -m minisgl course start {task.chapter} FOLDER`."
    )
    parts = (f"**Your turn, {task.id}: {task.title}**", task.spec, code, f"Its tests: *{tests}*.", more)
    return WithCode("\n\n".join(filter(None, parts)))


def check(identifier: str, *functions: Callable[..., Any] | type) -> None:
    """Run a task's tests with the reader's functions in place of ours, and print what became of them.

    The functions have the names that they have in the package; methods are plain functions, or in classes.
    """
    try:
        task = load_table().task(identifier)
        written = {stub: item for stub, item in _matched(task, functions).items() if not is_untouched(_text(item))}
        left = [stub.last_name for stub in task.stubs if stub not in written]
        if not written:
            print(f"Task {task.id} is not written yet: the chapter goes on with ours.")
        elif left:
            print(f"Task {task.id}: still to write: {', '.join(left)}.")
        else:
            _check(Sources(repository(), load_table()), task, written)
    except CourseError as error:
        print(error)


def _check(sources: Sources, task: Task, written: Functions) -> None:
    for stub, function in written.items():
        ours, theirs = (parameters(text) for text in (sources.solution(task)[stub], _text(function)))
        if ours != theirs:
            print(f"{stub.last_name} takes ({', '.join(theirs)}); the package calls it with ({', '.join(ours)}).")
    modules = {stub.path: exchanged(sources.read(stub.path), stub.path, written) for stub in written}
    path = next((stub.path for stub in written if stub.module == TOY), None)
    if check_functions(sources, task, modules) and path is not None:
        text = OWN_TOY.read_text(encoding="utf-8") if OWN_TOY.exists() else sources.read(path)
        try:
            OWN_TOY.write_text(exchanged(text, path, written), encoding="utf-8")
        except (CourseError, SyntaxError) as error:
            raise CourseError(f"{OWN_TOY.resolve()} is left as it is: {error}") from error
        print(f'{OWN_TOY} has your {", ".join(stub.name for stub in written)} now. Run it: python {OWN_TOY} "prompt"')


def exchanged(source: str, path: str, functions: Functions) -> str:
    """A module with the reader's functions, and with what these use and the module does not have."""
    mine = {stub.name: item for stub, item in functions.items() if stub.path == path}
    text = with_functions(source, {name: _text(function) for name, function in mine.items()})
    supplied: dict[str, str] = {}
    for function in mine.values():
        _supply(function, _bound(source), supplied)
    outside = [line for line in supplied.values() if "\n" not in line and "from minisgl" not in line]
    inside = [line for line in supplied.values() if line not in outside]  # below, where all of the module is defined
    lines, first = text.splitlines(), ast.parse(text).body[:2]  # a docstring, and what must precede other imports
    head = [node for node in first if isinstance(node, ast.Expr) or ast.unparse(node).startswith("from __future__")]
    place = max((node.end_lineno or 0 for node in head), default=0)
    return "\n".join([*lines[:place], *outside, *lines[place:], *inside]) + "\n"


def parameters(text: str) -> list[str]:
    """Names of the parameters of a definition."""
    ((_, node),) = functions_of(text)
    return [part.arg for part in ast.iter_child_nodes(node.args) if isinstance(part, ast.arg)]


def _matched(task: Task, items: tuple[Any, ...]) -> Functions:
    """The reader's functions by what they stand for. Raises `CourseError` if one is unknown or missing."""
    found: Functions = {}
    wanted = ", ".join(stub.name for stub in task.stubs)
    for item in _functions_in(items, task):
        names = (item.__qualname__.rpartition("<locals>.")[2], item.__name__)
        fitting = [stub for stub in task.stubs if names[0] == stub.name]
        fitting = fitting or [stub for stub in task.stubs if names[1] == stub.last_name]
        if not fitting:
            raise CourseError(f"{names[0]} is not a function of task {task.id}, which is about {wanted}")
        if len(fitting) > 1:
            classes = " and ".join(stub.name.rpartition(".")[0] for stub in fitting)
            raise CourseError(f"task {task.id} has several {names[1]}: write them in classes called {classes}")
        found[fitting[0]] = item
    for stub in task.stubs:
        if stub not in found:
            raise CourseError(f"task {task.id} needs {stub.name} too: check({task.id!r}, …, {stub.last_name})")
    return found


def _functions_in(items: tuple[Any, ...], task: Task) -> Iterator[FunctionType]:
    for item in items:
        if isinstance(item, type):
            names = [stub.last_name for stub in task.stubs if stub.name == f"{item.__name__}.{stub.last_name}"]
            yield from _functions_in(tuple(vars(item)[name] for name in names if name in vars(item)), task)
            continue
        for holder in ("fget", "__func__", "fn"):  # a property, a static method or a kernel of Triton's
            item = getattr(item, holder, None) or item
        function = inspect.unwrap(item)
        if not isinstance(function, FunctionType):
            raise CourseError(f"{item!r} is no function that you wrote; task {task.id} takes functions")
        yield function


def _text(item: Any) -> str:
    try:
        return textwrap.dedent(inspect.getsource(item))
    except (OSError, TypeError):
        raise CourseError(f"the text of {item.__name__} is not to be found: write it in a cell or in a file") from None


def _bound(source: str) -> set[str]:
    """Names that a module defines, without those that only type checkers see."""
    names: set[str] = set()
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(statement.name)
        elif not (isinstance(statement, ast.If) and ast.unparse(statement.test).endswith("TYPE_CHECKING")):
            for part in ast.walk(statement):
                if isinstance(part, ast.Name):
                    names.add(part.id)
                elif isinstance(part, ast.alias):
                    names.add(part.asname or part.name.partition(".")[0])
    return names


def _used(text: str) -> set[str]:
    """Names that a definition reads, in its body and in defaults, and does not bind itself."""
    ((_, node),) = functions_of(text)
    defaults = [each for each in (*node.args.defaults, *node.args.kw_defaults) if each is not None]
    names = [part for each in (*node.body, *defaults) for part in ast.walk(each) if isinstance(part, ast.Name)]
    bound = {name.id for name in names if not isinstance(name.ctx, ast.Load)}
    bound |= {part.arg for part in ast.walk(node) if isinstance(part, ast.arg)}
    return {name.id for name in names} - bound


def _supply(function: Any, bound: set[str], supplied: dict[str, str]) -> None:
    """Add a line, or a definition, for each name of the notebook that a function uses and its new module lacks."""
    names: Mapping[str, Any] = function.__globals__
    # A name that is nowhere is a NameError, as the reader will see.
    for name in sorted((_used(_text(function)) & names.keys()) - bound - supplied.keys() - vars(builtins).keys()):
        value = names[name]
        module = getattr(value, "__module__", None)
        if isinstance(value, ModuleType):
            supplied[name] = f"import {value.__name__} as {name}"
        elif isinstance(value, bool | int | float | str | bytes | None):
            supplied[name] = f"{name} = {value!r}"
        elif module != "__main__" and getattr(sys.modules.get(module or ""), name, None) is value:
            supplied[name] = f"from {module} import {name}"
        elif isinstance(value, FunctionType):
            supplied[name] = _text(value)
            _supply(value, bound, supplied)
        else:
            raise CourseError(f"{function.__name__} uses {name} of the notebook: define it inside the function")
