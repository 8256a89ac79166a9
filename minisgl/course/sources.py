"""Which chapter a module or a test belongs to, read off the table of tasks and the imports of the sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import minisgl
from minisgl.course.errors import CourseError
from minisgl.course.stubs import names_itself
from minisgl.course.table import Table

PACKAGE = "minisgl"
TESTS = "tests"


def repository() -> Path:
    """The checkout that this package runs from.

    Raises:
        CourseError: the package was installed without its tests and chapters.
    """
    root = Path(minisgl.__file__).parents[1]
    if not (root / TESTS).is_dir() or not (root / "chapters").is_dir():
        raise CourseError(
            f"the course needs the book's repository, and {root} is none: clone it, then run `pip install -e .[dev]` "
            "and this command in there"
        )
    return root


class Sources:
    """The files of a checkout, by chapter. They are parsed, never imported.

    Args:
        root: the checkout.
        table: what its chapters introduce.
    """

    def __init__(self, root: Path, table: Table) -> None:
        self.root = root
        self.table = table
        self._module_chapters = {name: each.number for each in table.chapters.values() for name in each.modules}
        self._stated = {test: each.number for each in table.chapters.values() for test in each.tests}
        self.modules = {_module_name(path): path for path in self._files(PACKAGE)}
        """Path of each module of the package, relative to the root."""
        self._all_imports = cache(self._read_imports)
        self.chapter_of_test = cache(self._chapter_of_test)

    def _files(self, folder: str) -> list[str]:
        return sorted(path.relative_to(self.root).as_posix() for path in (self.root / folder).rglob("*.py"))

    def read(self, path: str) -> str:
        """Text of a file of the checkout."""
        return (self.root / path).read_text(encoding="utf-8")

    # -- the package -------------------------------------------------------------------------------------------

    def chapter_of_module(self, name: str) -> int | None:
        """The chapter that introduces a module; None for one of the reader's tools.

        Raises:
            CourseError: the table does not know.
        """
        parts = name.split(".")
        for length in range(len(parts), 0, -1):
            prefix = ".".join(parts[:length])
            if prefix in self.table.tools:
                return None
            # The package itself is no chapter's: its ``__init__`` is there from the beginning.
            if prefix in self._module_chapters and (prefix != PACKAGE or name == PACKAGE):
                return self._module_chapters[prefix]
        raise CourseError(f"{name} belongs to no chapter: add it to the modules of one in minisgl/course/course.toml")

    def modules_until(self, chapter: int) -> list[str]:
        """Paths of the modules that chapters 1 to ``chapter`` introduce."""
        chapters = ((path, self.chapter_of_module(name)) for name, path in self.modules.items())
        return [path for path, number in chapters if number is not None and number <= chapter]

    def data_until(self, chapter: int) -> list[str]:
        """Paths of the files, other than modules, that the packages of chapters 1 to ``chapter`` read."""
        files = (path for path in (self.root / PACKAGE).rglob("*.*") if path.suffix not in (".py", ".pyc"))
        numbers = {
            path: self.chapter_of_module(path.replace("/", "."))
            for path in sorted(path.relative_to(self.root).as_posix() for path in files)
        }
        return [path for path, number in numbers.items() if number is not None and number <= chapter]

    def home(self, imported: str) -> str | None:
        """The module that defines what is imported as ``package.module.name``; None if that is not of the package."""
        name = imported
        while name and name not in self.modules:
            name = name.rpartition(".")[0]
        rest = imported[len(name) + 1 :]
        if name and rest:
            path = self.modules[name]
            if path.endswith("__init__.py"):
                for source, _ in self._all_imports(path):
                    if source.endswith(f".{rest}") and source != imported:
                        return self.home(source)
        return name or None

    # -- the tests ---------------------------------------------------------------------------------------------

    def test_files(self) -> list[str]:
        """Paths of all files with tests that are about a chapter."""
        files = [path for path in self._files(TESTS) if path.rpartition("/")[2].startswith("test_")]
        return [path for path in files if self.chapter_of_test(path) is not None]

    def _chapter_of_test(self, path: str) -> int | None:
        """The last chapter whose modules a test file needs; None for a test of the repository or the tools.

        Raises:
            CourseError: it needs no module, and the table does not tell where it belongs.
        """
        if any(path == entry or path.startswith(f"{entry}/") for entry in self.table.tool_tests):
            return None
        numbers: list[int] = []
        for file in [path] if path in self._stated else self.needed_by(path):
            if file in self._stated:
                numbers.append(self._stated[file])
                continue
            for imported in self.needed_imports(file):
                if (module := self.home(imported)) is not None:
                    number = self.chapter_of_module(module)
                    if number is None:
                        return None
                    numbers.append(number)
        if not numbers:
            raise CourseError(f"{path} belongs to no chapter: add it to the tests of one, or to the tool_tests")
        return max(numbers)

    def needed_by(self, path: str) -> list[str]:
        """A test file, the helpers that it imports, and the ``__init__`` and conftest files above them."""
        found: list[str] = []
        queue = [path]
        while queue:
            file = queue.pop()
            if file in found:
                continue
            found.append(file)
            queue += [above for above in self._above(file) if above not in found]
            helpers = [self._helper(imported) for imported in self.needed_imports(file)]
            queue += [helper for helper in helpers if helper is not None]
        return found

    def plugins(self) -> list[str]:
        """Paths of the pytest plugins that ``conftest.py`` names, with the files that they need."""
        named = [node.value for node in ast.parse(self.read("conftest.py")).body if isinstance(node, ast.Assign)]
        files = [f"{name.replace('.', '/')}.py" for value in named for name in ast.literal_eval(value)]
        return [path for file in files for path in self.needed_by(file)]

    def _above(self, path: str) -> Iterator[str]:
        for folder in Path(path).parents:
            if folder != Path("."):
                for name in ("__init__.py", "conftest.py"):
                    if (self.root / folder / name).is_file():
                        yield (folder / name).as_posix()

    def _helper(self, imported: str) -> str | None:
        """The file of the tests that an import reads."""
        name = imported
        while name.startswith(f"{TESTS}.") or name == TESTS:
            for path in (f"{name.replace('.', '/')}.py", f"{name.replace('.', '/')}/__init__.py"):
                if (self.root / path).is_file():
                    return path
            name = name.rpartition(".")[0]
        return None

    # -- imports -----------------------------------------------------------------------------------------------

    def needed_imports(self, path: str) -> list[str]:
        """Imports without which a file does not work."""
        return [imported for imported, is_needed in self._all_imports(path) if is_needed]

    def _read_imports(self, path: str) -> list[tuple[str, bool]]:
        """What a file imports anywhere, as ``package.module.name``, and whether it needs it."""
        found: list[tuple[str, bool]] = []
        for node in ast.walk(ast.parse(self.read(path))):
            if isinstance(node, ast.Import):
                found += [(alias.name, True) for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                found += [(f"{node.module}.{alias.name}", not names_itself(node)) for alias in node.names]
        return found


def _module_name(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
