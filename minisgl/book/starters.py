"""Starters: the whole package with the functions of a chapter's tasks taken away, their tests, and the chapter's text.

Everything is generated from the sources: a task is a function of the package whose body is replaced by an error.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import minisgl
from minisgl.book.course_table import Chapter, CourseError, Table, Task

PACKAGE = "minisgl"
TESTS = "tests"

Files = Mapping[str, str]
"""Text by path, relative to a folder."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def repository() -> Path:
    """The checkout that this package runs from.

    Raises `CourseError` if the package was installed without its tests and chapters.
    """
    root = Path(minisgl.__file__).parents[1]
    if not (root / TESTS).is_dir() or not (root / "chapters").is_dir():
        raise CourseError(
            f"the course needs the book's repository, and {root} is none: clone it, then run `pip install -e .[dev]` "
            "and this command in there"
        )
    return root


class Sources:
    """The files of a checkout and the table of its course. Sources are parsed, never imported."""

    def __init__(self, root: Path, table: Table) -> None:
        self.root = root
        self.table = table

    def read(self, path: str) -> str:
        """Text of a file of the checkout."""
        return (self.root / path).read_text(encoding="utf-8")

    def starter(self, number: int) -> Files:
        """What a reader begins a chapter with: everything but its tasks is written."""
        chapter = self.table.chapter_with_tasks(number)
        paths = ["LICENSE"]
        for folder, suffix in (("chapters", "md"), ("notebooks", "ipynb")):
            found = sorted((self.root / folder).glob(f"{number:02d}-*.{suffix}"))
            paths += [path.relative_to(self.root).as_posix() for path in found]
        texts = {path: self.read(path) for path in paths}
        return {**self.package(chapter.tasks), **self.suite(chapter), **texts, "README.md": _readme(chapter)}

    def package(self, unwritten: Sequence[Task] = ()) -> Files:
        """The package's files, with the functions of some tasks taken away."""
        found = sorted((self.root / PACKAGE).rglob("*.*"))
        paths = [path.relative_to(self.root).as_posix() for path in found if path.is_file() and path.suffix != ".pyc"]
        return {**{path: self.read(path) for path in paths}, **self.modules_of(unwritten, unwritten)}

    def modules_of(self, tasks: Sequence[Task], unwritten: Sequence[Task]) -> Files:
        """The modules in which the functions of ``tasks`` are, with those of the ``unwritten`` taken away."""
        messages: dict[str, dict[str, str]] = {stub.path: {} for task in tasks for stub in task.stubs}
        for task in unwritten:
            for stub in task.stubs:
                messages[stub.path][stub.name] = task.message(stub)
        return {path: with_stubs(self.read(path), stubs) for path, stubs in messages.items()}

    def solution(self, number: int) -> Iterator[str]:
        """Lines of a unified diff: what the starter of a chapter lacks."""
        tasks = self.table.chapter_with_tasks(number).tasks
        for path, begun in self.modules_of(tasks, tasks).items():
            lines = begun.splitlines(), self.read(path).splitlines()
            yield from difflib.unified_diff(*lines, f"a/{path}", f"b/{path}", lineterm="")

    # -- tests -----------------------------------------------------------------------------------------------------

    def suite(self, chapter: Chapter) -> Files:
        """The test files of a chapter's tasks, with all that they need."""
        paths = {"pyproject.toml", "conftest.py", f"{TESTS}/skip-budget.txt"}
        for path in [*files_with_tests(chapter), *self._plugins()]:
            paths.update(self._needed_by(path))
        return {path: self.read(path) for path in sorted(paths)}

    def _needed_by(self, path: str) -> list[str]:
        """A test file, the helpers that it imports, and the ``__init__`` and conftest files above them."""
        found: list[str] = []
        queue = [path]
        while queue:
            file = queue.pop()
            if file not in found:
                found.append(file)
                queue += [*self._above(file), *self._helpers(file)]
        return found

    def _plugins(self) -> list[str]:
        """Paths of the pytest plugins that ``conftest.py`` names."""
        named = [node.value for node in ast.parse(self.read("conftest.py")).body if isinstance(node, ast.Assign)]
        return [f"{name.replace('.', '/')}.py" for value in named for name in ast.literal_eval(value)]

    def _above(self, path: str) -> Iterator[str]:
        for folder in Path(path).parents:
            if folder != Path("."):
                for name in ("__init__.py", "conftest.py"):
                    if (self.root / folder / name).is_file():
                        yield (folder / name).as_posix()

    def _helpers(self, path: str) -> Iterator[str]:
        """The files of the tests that a file imports, as modules or names of modules."""
        for node in ast.walk(ast.parse(self.read(path))):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for path in (name.replace(".", "/") for name in names if name.startswith(f"{TESTS}.")):
                yield from (file for file in (f"{path}.py", f"{path}/__init__.py") if (self.root / file).is_file())


def files_with_tests(chapter: Chapter) -> list[str]:
    """Paths of the files that hold tests of a chapter's tasks."""
    return sorted({test.partition("::")[0] for task in chapter.tasks for test in task.tests})


def write(files: Files, directory: Path) -> None:
    """Write a folder that is not there yet, or is empty.

    Raises `CourseError` if something is there, or cannot be written. Nothing that was there is changed.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CourseError(f"{directory} is there already and is not an empty folder; name a new one")
    try:
        for path, text in files.items():
            file = directory / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CourseError(f"cannot write {directory}: {error.strerror}; name a folder that can be written") from error


def find_package(directory: Path, chapter: Chapter) -> None:
    """Make sure that a folder holds a package in which a chapter's tasks can be written.

    Raises `CourseError` if it does not.
    """
    if not (directory / PACKAGE / "__init__.py").is_file():
        raise CourseError(
            f"{directory} has no package {PACKAGE}/; name the folder that `python -m minisgl course start` wrote"
        )
    wanted = [stub.path for task in chapter.tasks for stub in task.stubs]
    missing = next((path for path in wanted if not (directory / path).is_file()), None)
    texts = list(directory.glob("chapters/*.md"))
    if missing is None and texts and not any(text.name.startswith(f"{chapter.number:02d}-") for text in texts):
        missing = f"chapters/{chapter.number:02d}-….md"
    if missing is not None:
        raise CourseError(
            f"{directory} has no {missing}, so it is not of chapter {chapter.number}; "
            f"`python -m minisgl course start {chapter.number} NEW-FOLDER` writes one that is"
        )


def _readme(chapter: Chapter) -> str:
    lines = [
        f"# Chapter {chapter.number}: {chapter.title}",
        "",
        "This is the whole package, but these functions are yours to write; find one by the text of its error, such as",
        f'"{chapter.tasks[0].messages[0]}":',
        "",
    ]
    for task in chapter.tasks:
        lines.append(f"{task.number}. {task.title}")
        lines += [f"    - `{stub.name}` in `{stub.path}`" for stub in task.stubs]
    lines += [
        "",
        "Their docstrings say what they do, the chapter in `chapters/` says why. To check what you have written, run",
        "this in the book's repository:",
        "",
        f"    python -m minisgl course check {chapter.number} PATH-OF-THIS-FOLDER",
        "",
        "Where a test expects an error of a certain kind, the report shows the words that it looks for.",
        "",
        "To run tests by yourself, with a debugger or with prints, in this folder:",
        "",
        f"    python -m pytest {chapter.tasks[0].tests[0].partition('[')[0]}",
        "",
        "The notebook also reads files of the repository, such as results of benchmarks: open it there.",
    ]
    return "\n".join(lines) + "\n"


# -- taking bodies away: the text itself is cut, so that comments and formatting survive -----------------------------


def with_stubs(source: str, messages: Mapping[str, str]) -> str:
    """``source`` with functions whose bodies raise `NotImplementedError`; signature, decorators and docstring stay.

    Args:
        source: text of a module.
        messages: qualified name of a function → what the error says.

    Raises `CourseError` if there is no such function, or more than one.
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
