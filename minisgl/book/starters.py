"""Starters: the whole package with the functions of a chapter's tasks taken away, their tests, and the chapter's text.

Everything is generated from the sources: a task is a function of the package whose body is replaced by an error.
"""

from __future__ import annotations

import ast
import difflib
import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import minisgl
from minisgl.book.course_table import Chapter, CourseError, Stub, Table, Task

PACKAGE = "minisgl"
TESTS = "tests"

Files = Mapping[str, str]  # text by path, relative to a folder

Function = ast.FunctionDef | ast.AsyncFunctionDef
QUOTES = '"""'
_OTHER_TEST = re.compile(r"^ *from (tests\.[\w.]*test_\w+) import", re.MULTILINE)
_NOTHING = re.compile(r"pass|raise NotImplementedError(\(.*\))?", re.DOTALL)


def repository() -> Path:
    """The checkout that this package runs from. Raises `CourseError` if it was installed without tests and chapters."""
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
        self.root, self.table = root, table

    def read(self, path: str) -> str:
        """Text of a file of the checkout."""
        return (self.root / path).read_text(encoding="utf-8")

    def _paths(self, pattern: str) -> list[str]:
        """The files that fit a pattern, sorted."""
        found = sorted(path for path in self.root.glob(pattern) if path.is_file())
        return [path.relative_to(self.root).as_posix() for path in found]

    def starter(self, number: int) -> Files:
        """What a reader begins a chapter with: everything but its tasks is written."""
        chapter = self.table.chapter_with_tasks(number)
        texts = {"LICENSE": self.read("LICENSE"), "README.md": _readme(chapter)}
        texts |= {path: self.read(path) for path in self._paths(f"chapters/{number:02d}-*")}
        texts |= {path: _without_outputs(self.read(path)) for path in self._paths(f"notebooks/{number:02d}-*")}
        return {**self.package(chapter.tasks), **self.suite(chapter.tasks), **texts}

    def package(self, unwritten: Sequence[Task] = ()) -> Files:
        """The package's files, with the functions of some tasks taken away."""
        left_out = (".pyc", ".safetensors")  # the trained drafter is no text, and no task needs it
        paths = [path for path in self._paths(f"{PACKAGE}/**/*.*") if not path.endswith(left_out)]
        return {**{path: self.read(path) for path in paths}, **self.modules_of(unwritten, unwritten)}

    def modules_of(self, tasks: Sequence[Task], unwritten: Sequence[Task]) -> Files:
        """The modules in which the functions of ``tasks`` are, with those of the ``unwritten`` taken away."""
        messages: dict[str, dict[str, str]] = {stub.path: {} for task in tasks for stub in task.stubs}
        for task in unwritten:
            for stub in task.stubs:
                messages[stub.path][stub.name] = task.message(stub)
        return {path: with_stubs(self.read(path), stubs) for path, stubs in messages.items()}

    def missing(self, tasks: Sequence[Task]) -> Iterator[str]:
        """Lines of a unified diff: our solution of some tasks, which their starter lacks."""
        for path, begun in self.modules_of(tasks, tasks).items():
            yield from _difference(begun, self.read(path), path)

    def solution(self, task: Task) -> dict[Stub, str]:
        """Our functions of a task."""
        return {stub: function_text(self.read(stub.path), stub.name) for stub in task.stubs}

    def difference(self, task: Task, place: Path) -> Iterator[str]:
        """Lines of unified diffs from a reader's functions, in a package's folder or in a file, to ours."""
        for stub, ours in self.solution(task).items():
            path = place / stub.path if place.is_dir() else place
            try:
                source = path.read_text(encoding="utf-8")
                found = [name for name, _ in functions_of(source) if name in (stub.name, stub.last_name)]
            except (OSError, SyntaxError) as error:
                raise CourseError(f"{path} cannot be read: {error}") from error
            if not found:
                raise CourseError(f"{path} has no function {stub.name}, which is what task {task.id} is about")
            yield from _difference(function_text(source, found[0]), ours, f"{stub.path}:{stub.name}")

    def suite(self, tasks: Sequence[Task]) -> Files:
        """The test files of some tasks, all helpers of tests, and other test files that these import."""
        helpers = (path for path in self._paths(f"{TESTS}/**/*.py") if "/test_" not in path)
        paths = [*files_with_tests(tasks), *helpers]
        for path in paths:
            imported = (f"{name.replace('.', '/')}.py" for name in _OTHER_TEST.findall(self.read(path)))
            paths += [each for each in imported if each not in paths]
        return {path: self.read(path) for path in ("pyproject.toml", "conftest.py", f"{TESTS}/skip-budget.txt", *paths)}


def _difference(before: str, after: str, name: str) -> Iterator[str]:
    return difflib.unified_diff(before.splitlines(), after.splitlines(), f"a/{name}", f"b/{name}", lineterm="")


def _without_outputs(notebook: str) -> str:
    """A notebook as if it had never run: its outputs list functions that the reader is going to write."""
    content = json.loads(notebook)
    for cell in content["cells"]:
        if cell["cell_type"] == "code":
            cell |= {"outputs": [], "execution_count": None}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def files_with_tests(tasks: Sequence[Task]) -> list[str]:
    """Paths of the files that hold tests of some tasks."""
    return sorted({test.partition("::")[0] for task in tasks for test in task.tests})


def write(files: Files, directory: Path) -> None:
    """Write a new folder. Raises `CourseError` if something is there, which is not changed, or on failure."""
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
    """Raise `CourseError` if a folder holds no package in which a chapter's tasks can be written."""
    start = "`python -m minisgl course start`"
    if not (directory / PACKAGE).is_dir():
        raise CourseError(f"{directory} has no package {PACKAGE}/; name the folder that {start} wrote")
    if not (directory / PACKAGE / "__init__.py").is_file():
        raise CourseError(
            f"{directory} has no {PACKAGE}/__init__.py, without which {PACKAGE}/ is no package; "
            f"copy the file from a folder that {start} writes"
        )
    modules = (stub.path for task in chapter.tasks for stub in task.stubs)
    missing = [path for path in modules if not (directory / path).is_file()]
    texts = [text.name[:3] for text in directory.glob("chapters/*.md")]
    if texts and f"{chapter.number:02d}-" not in texts:
        missing.append(f"chapters/{chapter.number:02d}-….md")
    if missing:
        raise CourseError(
            f"{directory} has no {missing[0]}, so it is not of chapter {chapter.number}; "
            f"`python -m minisgl course start {chapter.number} NEW-FOLDER` writes one that is"
        )


def _readme(chapter: Chapter) -> str:
    tasks, first = list[str](), chapter.tasks[0]
    for task in chapter.tasks:
        tasks += [f"{task.number}. {task.title}", *(f"    - `{stub.name}` in `{stub.path}`" for stub in task.stubs)]
    test = first.tests[0].partition("[")[0]
    template = Path(__file__).with_name("starter.md").read_text(encoding="utf-8")
    return template.format(chapter=chapter, first=first, test=test, tasks="\n".join(tasks))


# -- exchanging functions: the text itself is cut, so that comments and formatting survive ---------------------------


def functions_of(source: str) -> list[tuple[str, Function]]:
    """Qualified name and definition of each function and method of a module."""

    def visit(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, Function]]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, Function):
                yield prefix + node.name, node

    return list(visit(ast.parse(source).body, ""))


def _function(source: str, name: str) -> Function:
    found = [node for qualified, node in functions_of(source) if qualified == name]
    if len(found) != 1:
        raise CourseError(f"{name!r} is defined {len(found)} times; a task needs a function that is defined once")
    return found[0]


def function_text(source: str, name: str) -> str:
    """The definition of a function, without decorators and from the first column on."""
    node = _function(source, name)
    return textwrap.dedent("".join(source.splitlines(keepends=True)[node.lineno - 1 : node.end_lineno]))


def with_functions(source: str, texts: Mapping[str, str]) -> str:
    """A module's text with other definitions for some functions; decorators and the class around a method stay.

    ``texts`` has them by qualified name. Raises `CourseError` if there is no such function, or more than one.
    """
    lines, nodes = source.splitlines(keepends=True), {name: _function(source, name) for name in texts}
    for name, node in sorted(nodes.items(), key=lambda item: item[1].lineno, reverse=True):  # earlier lines stay right
        lines[node.lineno - 1 : node.end_lineno] = [_indented(texts[name], node.col_offset)]
    return "".join(lines)


def with_stubs(source: str, messages: Mapping[str, str]) -> str:
    """The same with bodies that raise `NotImplementedError` with a message; signature and docstring stay, too."""
    stubs = {}
    for name, message in messages.items():
        signature, docstring = _head(function_text(source, name))
        stubs[name] = f'{signature}{docstring}    raise NotImplementedError("{message}")\n'
    return with_functions(source, stubs)


def outline(source: str, name: str) -> str:
    """Signature of a function and the first paragraph of its docstring."""
    text = function_text(source, name)
    documented = ast.get_docstring(ast.parse(text).body[0])  # type: ignore[arg-type]
    paragraph = f"{QUOTES}{documented.partition(chr(10) * 2)[0]}{QUOTES}" if documented else ""
    return (_head(text)[0] + textwrap.indent(paragraph, "    ")).rstrip()


def _head(text: str) -> tuple[str, str]:
    """The lines of a definition's signature, and of its docstring, if it has one."""
    ((name, node),) = functions_of(text)
    lines, first = text.splitlines(keepends=True), node.body[0]
    start = min([first.lineno, *(each.lineno for each in getattr(first, "decorator_list", []))]) - 1
    if start < node.lineno:
        raise CourseError(f"{name!r} is written in one line; give its body a line of its own")
    if ast.get_docstring(node, clean=False) is not None:
        return "".join(lines[:start]), "".join(lines[start : first.end_lineno])
    while lines[start - 1].strip().startswith("#") or not lines[start - 1].strip():
        start -= 1  # a comment above the first statement belongs to the body
    return "".join(lines[:start]), ""


def is_untouched(text: str) -> bool:
    """Whether a definition has a docstring at most, and then ``raise NotImplementedError``, ``...`` or ``pass``."""
    ((_, node),) = functions_of(text)
    constants = (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) for each in node.body)
    texts = map(ast.unparse, node.body)
    return all(empty or _NOTHING.fullmatch(text) for empty, text in zip(constants, texts, strict=True))


def _indented(text: str, columns: int) -> str:
    """A definition moved to the right, but for the lines inside its strings; docstrings move along."""
    ((_, node),) = functions_of(text)
    docstrings = {id(part.value) for part in ast.walk(node) if isinstance(part, ast.Expr)}
    inside: set[int] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Constant | ast.JoinedStr) and id(part) not in docstrings:
            inside.update(range(part.lineno + 1, (part.end_lineno or 0) + 1))
    own = list(enumerate(text.splitlines(), start=1))[node.lineno - 1 : node.end_lineno]
    return "".join(f"{line if number in inside or not line else ' ' * columns + line}\n" for number, line in own)
