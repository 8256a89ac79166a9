"""A reader's functions in a notebook: untouched, wrong, right, and what they say of themselves."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from minisgl.book import attempts, check, your_turn
from minisgl.book.course_table import CourseError, Stub, Table, Task, load_table
from minisgl.book.starters import Sources, repository
from tests.course.tasks import task_with

SOURCES = Sources(repository(), load_table())
SPLIT = task_with("RadixCache._split")
ALLOC = task_with("PagePool.alloc")


def defined(folder: Path, source: str, **names: object) -> dict[str, object]:
    """What a cell defines; a file, so that its text is to be found."""
    file = folder / f"cell_{len(list(folder.iterdir()))}.py"
    file.write_text(textwrap.dedent(source), encoding="utf-8")
    scope: dict[str, object] = {"__name__": "__main__", **names}
    exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), scope)
    return scope


# -- what to write -----------------------------------------------------------------------------------------------------


def test_a_task_shows_signature_tests_and_where_help_is() -> None:
    text = your_turn(SPLIT.id).text
    assert text.startswith(f"**Your turn, {SPLIT.id}: {SPLIT.title}**")
    assert (
        "# a method of RadixCache in minisgl/kvcache/radix.py\ndef _split(self, node: Node, count: int) -> Node:"
        in text
    )
    assert "an edge is split where a branch leaves it; " in text
    assert f"python -m minisgl course hint {SPLIT.id}" in text
    assert f"python -m minisgl course start {SPLIT.chapter} FOLDER" in text
    assert "NotImplementedError" not in text


@pytest.mark.parametrize("task", [task for each in load_table().chapters.values() for task in each.tasks], ids=str)
def test_every_task_can_be_shown_and_is_not_written_where_it_is_untouched(
    task: Task, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(your_turn(task.id).text) > 200
    classes: dict[str, str] = {}
    for stub, text in SOURCES.solution(task).items():
        owner, _, name = stub.name.rpartition(".")
        classes[owner] = classes.get(owner, "") + f"def {name}({', '.join(attempts.parameters(text))}):\n    ...\n"
    cell = "".join(
        f"class {owner}:\n{textwrap.indent(body, '    ')}" if owner else body for owner, body in classes.items()
    )
    scope = defined(tmp_path, cell)
    check(task.id, *(scope[owner or name] for stub in task.stubs for owner, _, name in [stub.name.rpartition(".")]))
    assert capsys.readouterr().out == f"Task {task.id} is not written yet: the chapter goes on with ours.\n"


# -- what became of it -------------------------------------------------------------------------------------------------


def test_ours_passes_with_a_line_a_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cell = next(iter(SOURCES.solution(SPLIT).values()))
    check(SPLIT.id, defined(tmp_path, f"from __future__ import annotations\n{cell}")["_split"])
    output = capsys.readouterr().out.splitlines()
    assert output[:2] == [f"{SPLIT.id} {SPLIT.title}", "  ✓ an edge is split where a branch leaves it"]
    assert output[-1] == "All 9 tests pass."
    assert len(output) == 11


def test_where_there_is_one_test_it_is_the_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = task_with("exit_error")
    cell = f"from __future__ import annotations\n{next(iter(SOURCES.solution(task).values()))}"
    check(task.id, defined(tmp_path, cell)["exit_error"])
    assert capsys.readouterr().out.endswith("The test passes.\n")


def test_a_wrong_one_hears_what_the_test_expects(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a helper of the notebook, and a module under a name that the package does not use."""
    cell = """
    import numpy as numbers
    LIMIT = 1
    def least(count):
        return min(count, LIMIT)
    def page_bytes(geometry, page_size, dtype):
        return int(numbers.int64(least(page_size)))
    def pages_from_free_memory(*arguments):
        return 1
    def pages_from_peak(*arguments):
        print("I was here")
        raise KeyError("peak")
    """
    scope = defined(tmp_path, cell)
    task = task_with("pages_from_peak")
    check(task.id, *(scope[stub.name] for stub in task.stubs))
    output = capsys.readouterr().out
    assert "page_bytes takes (geometry, page_size, dtype); the package calls it with (" in output
    assert "✗ page bytes is what a page of the cache takes" in output
    assert "TypeError: page_bytes() got an unexpected keyword argument" in output
    assert re.search(r"in the test, tests/kvcache/test_sizing.py, line \d+, case .+:\n +def test_page_bytes_", output)
    assert re.search(r"\n +→ +a_page = page_bytes\(", output), "the test, as far as it came"
    assert "pytest" not in output, "no internals"
    assert f"A hint: python -m minisgl course hint {task.id}" in output


def test_an_error_is_shown_in_the_line_of_the_readers_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cell = """
    def little(self):
        '''Mine.'''
        print("the rate is", 1)
        return self.rate * {}["time"]
    """
    check(task_with("LoadSummary.little").id, defined(tmp_path, cell)["little"])
    output = capsys.readouterr().out
    assert "✗ rates are over all the time and of what finished" in output
    assert re.search(r"in your LoadSummary.little, line \d of it: return self.rate", output)
    assert "printed until then:" in output
    assert "the rate is 1" in output


def test_a_loop_without_an_end_is_stopped_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minisgl.book.checks.SECONDS_PER_TEST", 4)
    check(SPLIT.id, defined(tmp_path, "def _split(self, node, count):\n    while True:\n        pass\n")["_split"])
    output = capsys.readouterr().out
    assert output.count("✗") == 1
    assert "took longer than 4 seconds, and was stopped: look for a loop, or an await, that never ends" in output
    assert re.search(r"in your RadixCache._split, line [23] of it", output)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["other"], f"other is not a function of task {ALLOC.id}, which is about PagePool.alloc, PagePool.free"),
        (["alloc"], f"task {ALLOC.id} needs PagePool.free too"),
        (["alloc", "free"], f"Task {ALLOC.id}: still to write: free."),
        (["alloc", "number"], "3 is no function that you wrote"),
        (["alloc", "unseen"], "the text of free is not to be found: write it in a cell or in a file"),
        (["alloc", "greedy"], "free uses MINE of the notebook: define it inside the function"),
    ],
)
def test_what_cannot_be_checked_is_told(
    given: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scope = defined(
        tmp_path,
        "def other(): return 1\ndef alloc(self, count): return 1\ndef free(self, pages): ...\nnumber = 3\n"
        "exec('def unseen(self, pages): return 1'); unseen.__name__ = unseen.__qualname__ = 'free'\n",
    )
    scope["greedy"] = defined(tmp_path, "def free(self, pages): return MINE", MINE=np.arange(3))["free"]
    check(ALLOC.id, *(scope[name] for name in given))
    assert capsys.readouterr().out.startswith(message)


def test_functions_of_one_name_are_told_apart_by_their_classes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stubs = tuple(Stub("minisgl.layers.mlp", f"{owner}.forward") for owner in ("Experts", "MoE"))
    task = replace(task_with("MoE.forward"), chapter=2, number=1, stubs=stubs)
    table = Table({2: replace(load_table().chapters[2], tasks=(task,))}, ())
    monkeypatch.setattr(attempts, "load_table", lambda: table)
    scope = defined(tmp_path, "def forward(self, x): return x")
    check("2.1", scope["forward"])
    assert "task 2.1 has several forward: write them in classes called Experts and MoE" in capsys.readouterr().out
    scope = defined(
        tmp_path, "class Experts:\n    def forward(self, x): return x\nclass MoE(Experts):\n    forward = 1"
    )
    check("2.1", scope["Experts"])
    assert "task 2.1 needs MoE.forward too" in capsys.readouterr().out


def test_a_kernel_of_triton_is_a_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cell = "from __future__ import annotations\nimport triton, triton.language as tl\n@triton.jit\n"
    cell += next(iter(SOURCES.solution(task_with("add_parts")).values()))
    check(task_with("add_parts").id, defined(tmp_path, cell)["add_parts"])
    assert "All 2 tests pass." in capsys.readouterr().out


def test_without_the_repository_it_is_said_how_to_get_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> Path:
        raise CourseError("the course needs the book's repository: clone it")

    monkeypatch.setattr(attempts, "repository", none)
    scope = defined(tmp_path, "def _split(self, node, count): return node\ndef _empty(self): ...")
    check(SPLIT.id, scope["_split"])
    assert capsys.readouterr().out == "the course needs the book's repository: clone it\n"


# -- the toy engine ----------------------------------------------------------------------------------------------------


def test_the_toy_engine_is_the_readers_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another module in its place: what passes is saved, what fails is not, and what was saved stays."""
    lock = task_with("BlockHashCache.lock")
    stubs = tuple(Stub("minisgl.kvcache.block_hash", f"BlockHashCache.{name}") for name in ("lock", "unlock"))
    monkeypatch.setattr(attempts, "TOY", "minisgl.kvcache.block_hash")
    tasks = tuple(replace(lock, chapter=7, number=n, stubs=(stubs[n - 1],)) for n in (1, 2))
    table = Table({7: replace(load_table().chapters[lock.chapter], number=7, tasks=tasks)}, ())
    monkeypatch.setattr(attempts, "load_table", lambda: table)
    monkeypatch.chdir(tmp_path)
    ours = [next(iter(SOURCES.solution(task).values())) for task in table.chapters[7].tasks]
    mine = [text.replace(":\n", ":  # mine\n", 1) for text in ours]
    scopes = [defined(tmp_path, f"from __future__ import annotations\n{text}") for text in mine]
    check("7.1", defined(tmp_path, "def lock(self, node):\n    return None\n")["lock"])
    assert not Path("toy.py").exists()
    check("7.1", scopes[0]["lock"])
    assert 'toy.py has your BlockHashCache.lock now. Run it: python toy.py "prompt"' in capsys.readouterr().out
    assert Path("toy.py").read_text().count("# mine") == 1
    check("7.2", scopes[1]["unlock"])
    assert Path("toy.py").read_text().count("# mine") == 2
    Path("toy.py").write_text("print('all mine')\n")
    check("7.2", scopes[1]["unlock"])
    assert "toy.py is left as it is: 'BlockHashCache.unlock' is defined 0 times" in capsys.readouterr().out
    assert Path("toy.py").read_text() == "print('all mine')\n"


def test_names_of_the_notebook_come_along(tmp_path: Path) -> None:
    scope = defined(
        tmp_path,
        """
        import numpy as np
        from collections import deque
        HALF = 0.5
        def helper(x):
            return np.floor(x * HALF)
        def graph_sizes(limit, first=deque):
            return helper(limit), first, unknown
        """,
    )
    source = '"""A module."""\nfrom __future__ import annotations\ndef graph_sizes(limit): return 1\n'
    text = attempts.exchanged(source, "minisgl/a.py", {Stub("minisgl.a", "graph_sizes"): scope["graph_sizes"]})
    made: dict[str, object] = {"unknown": 1}
    head, _, tail = text.partition("def graph_sizes")
    assert head.startswith('"""A module."""\nfrom __future__ import annotations\n')
    assert {"import numpy as np", "from collections import deque", "HALF = 0.5"} <= set(head.splitlines())
    assert "def helper" in tail
    exec(text, made)
    assert made["graph_sizes"](5)[0] == 2


@pytest.mark.slow
def test_in_a_kernel(tmp_path: Path) -> None:
    """Where functions have no file, and their text is the cell's."""
    cells = [
        "from minisgl.book import check",
        "def _split(self, node, count):\n    raise NotImplementedError",
        f'check("{SPLIT.id}", _split)',
        "def _split(self, node, count):\n    return node",
        f'check("{SPLIT.id}", _split)',
    ]
    script = (
        "from nbclient import NotebookClient\nfrom nbformat.v4 import new_code_cell, new_notebook\n"
        f"book = new_notebook(cells=[new_code_cell(cell) for cell in {cells!r}])\n"
        "NotebookClient(book, timeout=120).execute()\n"
        "print(''.join(o.get('text', '') for cell in book.cells for o in cell.get('outputs', [])))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert f"Task {SPLIT.id} is not written yet" in done.stdout, done.stderr[-2000:]
    assert "✗ an edge is split where a branch leaves it" in done.stdout
