"""Starters: the whole package with the functions of a chapter's tasks taken away, their tests, and the chapter's text.

Everything is generated from the sources: a task is a function of the package whose body is replaced by an error.
"""

from __future__ import annotations

import ast
import difflib
import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import minisgl
from minisgl.book.course_table import Chapter, CourseError, Stub, Table, Task

PACKAGE = "minisgl"
TESTS = "tests"

Files = Mapping[str, str]
"""Text by path, relative to a folder."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
QUOTES = '"""'


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
        texts = {
            path: without_outputs(self.read(path)) if path.endswith("ipynb") else self.read(path) for path in paths
        }
        return {**self.package(chapter.tasks), **self.suite(chapter.tasks), **texts, "README.md": _readme(chapter)}

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

    def missing(self, tasks: Sequence[Task]) -> Iterator[str]:
        """Lines of a unified diff: our solution of some tasks, which their starter lacks."""
        for path, begun in self.modules_of(tasks, tasks).items():
            yield from _difference(begun, self.read(path), path)

    def solution(self, task: Task) -> dict[Stub, str]:
        """Our functions of a task."""
        return {stub: function_text(self.read(stub.path), stub.name) for stub in task.stubs}

    def difference(self, task: Task, place: Path) -> Iterator[str]:
        """Lines of unified diffs from a reader's functions to ours.

        Args:
            place: a folder that holds a package, or a file with the functions, methods in classes or without.
        """
        for stub, ours in self.solution(task).items():
            path = place / stub.path if place.is_dir() else place
            try:
                source = path.read_text(encoding="utf-8")
                name = next(name for name, _ in functions_of(source) if name in (stub.name, stub.last_name))
            except (OSError, SyntaxError) as error:
                raise CourseError(f"{path} cannot be read: {error}") from error
            except StopIteration:
                raise CourseError(
                    f"{path} has no function {stub.name}, which is what task {task.id} is about"
                ) from None
            yield from _difference(function_text(source, name), ours, f"{stub.path}:{stub.name}")

    # -- tests -----------------------------------------------------------------------------------------------------

    def suite(self, tasks: Sequence[Task]) -> Files:
        """The test files of some tasks, with all that they need."""
        paths = {"pyproject.toml", "conftest.py", f"{TESTS}/skip-budget.txt"}
        for path in [*files_with_tests(tasks), *self._plugins()]:
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


def _difference(before: str, after: str, name: str) -> Iterator[str]:
    lines = before.splitlines(), after.splitlines()
    return difflib.unified_diff(*lines, f"a/{name}", f"b/{name}", lineterm="")


def without_outputs(notebook: str) -> str:
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
        "Where a test expects an error of a certain kind, the report shows the words that it looks for. A nudge, our",
        "functions, and how yours differ from them:",
        "",
        f"    python -m minisgl course hint {chapter.tasks[0].id}",
        f"    python -m minisgl course solution {chapter.tasks[0].id}",
        f"    python -m minisgl course diff {chapter.tasks[0].id} PATH-OF-THIS-FOLDER",
        "",
        "To run tests by yourself, with a debugger or with prints, in this folder:",
        "",
        f"    python -m pytest {chapter.tasks[0].tests[0].partition('[')[0]}",
        "",
        "The notebook also reads files of the repository, such as results of benchmarks: open it there.",
    ]
    return "\n".join(lines) + "\n"


# -- exchanging functions: the text itself is cut, so that comments and formatting survive ---------------------------


def with_stubs(source: str, messages: Mapping[str, str]) -> str:
    """``source`` with functions whose bodies raise `NotImplementedError`; signature, decorators and docstring stay.

    Args:
        source: text of a module.
        messages: qualified name of a function → what the error says.

    Raises `CourseError` if there is no such function, or more than one.
    """
    lines = source.splitlines(keepends=True)
    for name, node in _from_the_end(source, messages):
        indent = " " * (node.col_offset + 4)
        lines[_body_start(lines, node) : node.end_lineno] = [f'{indent}raise NotImplementedError("{messages[name]}")\n']
    return "".join(lines)


def with_functions(source: str, texts: Mapping[str, str]) -> str:
    """``source`` with functions replaced by others; decorators stay, and so does the class around a method.

    Args:
        source: text of a module.
        texts: qualified name of a function → a definition, whose own decorators do not count.

    Raises `CourseError` if there is no such function, or more than one.
    """
    lines = source.splitlines(keepends=True)
    for name, node in _from_the_end(source, texts):
        lines[node.lineno - 1 : node.end_lineno] = [_indented(texts[name], node.col_offset)]
    return "".join(lines)


def function_text(source: str, name: str) -> str:
    """The definition of a function, without decorators and from the first column on."""
    ((_, node),) = _from_the_end(source, [name])
    return textwrap.dedent("".join(source.splitlines(keepends=True)[node.lineno - 1 : node.end_lineno]))


def outline(source: str, name: str) -> str:
    """Signature of a function and the first paragraph of its docstring."""
    ((_, node),) = _from_the_end(source, [name])
    lines = source.splitlines(keepends=True)
    documented = ast.get_docstring(node)
    end = node.body[0].lineno - 1 if documented else _body_start(lines, node)
    header = textwrap.dedent("".join(lines[node.lineno - 1 : end])).rstrip()
    if not documented:
        return header
    return f"{header}\n{textwrap.indent(f'{QUOTES}{documented.partition(chr(10) * 2)[0]}{QUOTES}', '    ')}"


def is_untouched(text: str) -> bool:
    """Whether a definition has a docstring at most, and then ``raise NotImplementedError``, ``...`` or ``pass``."""
    ((_, node),) = functions_of(text)
    return all(_says_nothing(statement) for statement in node.body)


def functions_of(source: str) -> list[tuple[str, Function]]:
    """Qualified name and definition of each function and method of a module."""
    found: list[tuple[str, Function]] = []

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, Function):
                found.append((prefix + node.name, node))

    visit(ast.parse(source).body, "")
    return found


def _from_the_end(source: str, names: Iterable[str]) -> list[tuple[str, Function]]:
    """Functions from the last line upwards, so that the positions of what comes earlier stay right."""
    functions, wanted = functions_of(source), []
    for name in names:
        found = [node for qualified, node in functions if qualified == name]
        if len(found) != 1:
            raise CourseError(f"{name!r} is defined {len(found)} times; a task needs a function that is defined once")
        wanted.append((name, found[0]))
    return sorted(wanted, key=lambda pair: pair[1].lineno, reverse=True)


def _body_start(lines: list[str], node: Function) -> int:
    """Where the body begins, as a place in ``lines``, after signature and docstring."""
    first = node.body[0]
    if ast.get_docstring(node, clean=False) is not None:
        assert first.end_lineno is not None
        return first.end_lineno
    start = first.lineno - 1
    if isinstance(first, Function | ast.ClassDef) and first.decorator_list:
        start = first.decorator_list[0].lineno - 1
    while lines[start - 1].strip().startswith("#") or not lines[start - 1].strip():
        start -= 1  # a comment above the first statement belongs to the body
    if first.lineno == node.lineno:
        raise CourseError(f"{node.name!r} is written in one line; give its body a line of its own")
    return start


def _indented(text: str, columns: int) -> str:
    """A definition moved to the right, but for the lines inside its strings; docstrings move along."""
    ((_, node),) = functions_of(text)
    docstrings = {id(part.value) for part in ast.walk(node) if isinstance(part, ast.Expr)}
    inside: set[int] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Constant | ast.JoinedStr) and id(part) not in docstrings:
            inside.update(range(part.lineno + 1, (part.end_lineno or 0) + 1))
    assert node.end_lineno is not None
    own = list(enumerate(text.splitlines(), start=1))[node.lineno - 1 : node.end_lineno]
    return "".join(f"{line if number in inside or not line else ' ' * columns + line}\n" for number, line in own)


def _says_nothing(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Raise):
        raised = statement.exc.func if isinstance(statement.exc, ast.Call) else statement.exc
        return isinstance(raised, ast.Name) and raised.id == "NotImplementedError"
    is_constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)  # a docstring, or ...
    return isinstance(statement, ast.Pass) or is_constant
