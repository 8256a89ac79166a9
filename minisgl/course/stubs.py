"""Source transformations. They cut and splice the text itself, so that comments and formatting survive."""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping

from minisgl.course.errors import CourseError

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def with_stubs(source: str, messages: Mapping[str, str]) -> str:
    """``source`` with functions whose bodies are taken away.

    Signature, decorators and docstring stay; calling such a function raises `NotImplementedError`.

    Args:
        source: text of a module.
        messages: qualified name of a function → what the error says.

    Raises:
        CourseError: there is no such function, or more than one.
    """
    functions = _functions(ast.parse(source))
    lines = source.splitlines(keepends=True)
    nodes = []
    for name in messages:
        found = [node for qualified, node in functions if qualified == name]
        if len(found) != 1:
            raise CourseError(f"{name!r} is defined {len(found)} times; a task needs a function that is defined once")
        nodes.append((found[0], messages[name]))
    # From the end of the file upwards, so that the positions of what comes earlier stay right.
    for node, message in sorted(nodes, key=lambda pair: pair[0].lineno, reverse=True):
        _take_body(lines, node, message)
    return "".join(lines)


def names_itself(node: ast.ImportFrom) -> bool:
    """Whether an import is of the form ``import radix as radix``: for what importing it does, not for a name."""
    return all(alias.asname == alias.name for alias in node.names)


def line_of(source: str, name: str) -> int | None:
    """The line at which a function begins, if it is there."""
    return next((node.lineno for qualified, node in _functions(ast.parse(source)) if qualified == name), None)


def _functions(tree: ast.Module) -> list[tuple[str, _Function]]:
    found: list[tuple[str, _Function]] = []

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, _Function):
                found.append((prefix + node.name, node))

    visit(tree.body, "")
    return found


def _take_body(lines: list[str], node: _Function, message: str) -> None:
    """Replace what follows signature and docstring, in place."""
    first = node.body[0]
    assert node.end_lineno is not None
    documented = ast.get_docstring(node, clean=False) is not None
    if documented:
        assert first.end_lineno is not None
        start = first.end_lineno
    else:
        start = first.lineno - 1
        if isinstance(first, _Function | ast.ClassDef) and first.decorator_list:
            start = first.decorator_list[0].lineno - 1
        while lines[start - 1].strip().startswith("#") or not lines[start - 1].strip():
            start -= 1  # a comment above the first statement belongs to the body
        if start < first.lineno and first.lineno == node.lineno:
            raise CourseError(f"{node.name!r} is written in one line; give its body a line of its own")
    indent = " " * (first.col_offset if documented else node.col_offset + 4)
    lines[start : node.end_lineno] = [f'{indent}raise NotImplementedError("{message}")\n']


def without_later_imports(source: str, is_there: Callable[[str], bool], is_init: bool) -> str:
    """``source`` without the re-exports, and the imports for registration alone, of modules that are not there yet.

    Those are the imports of an ``__init__.py`` and those that name a module as itself, ``import radix as radix``;
    what was imported so is taken out of ``__all__`` too.

    Args:
        source: text of a module.
        is_there: whether what is imported, ``package.module.name``, is part of the chapter's package.
        is_init: the module is an ``__init__.py``.
    """
    tree = ast.parse(source)
    gone: set[str] = set()
    cuts: list[tuple[int, int]] = []
    for node in tree.body:
        if not isinstance(node, ast.ImportFrom) or node.module is None:
            continue
        if not any(is_there(f"{node.module}.{alias.name}") for alias in node.names) and (is_init or names_itself(node)):
            gone |= {alias.asname or alias.name for alias in node.names}
            cuts.append((node.lineno, node.end_lineno or node.lineno))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            assert isinstance(node.value, ast.List)
            cuts += [(each.lineno, each.lineno) for each in node.value.elts if ast.literal_eval(each) in gone]
    lines = source.splitlines(keepends=True)
    for first, last in sorted(cuts, reverse=True):
        del lines[first - 1 : last]
    return "".join(lines)
