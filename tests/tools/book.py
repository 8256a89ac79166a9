"""A book of one chapter, for tests of the pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat

from tools.notebooks import HOSTED, pair

CHAPTER = """# A chapter

What is it?

```python
answer = 40 + 2
print(answer)
```

```python tags=["measured"]
answer
```

~~~bash
make nothing
~~~

<details><summary>Why?</summary>

Because.

</details>
"""


def listing(code: str, line: int = 2) -> str:
    return f"`minisgl/part.py`, line {line}\n\n```python\n{code}\n```"


def make(root: Path) -> None:
    """Write the chapter, and its notebook with the outputs that a run would leave."""
    for name in ("chapters", "notebooks", "minisgl", "tests"):
        (root / name).mkdir()
    (root / "tests" / "kept-results-budget.txt").write_text("1\nbecause\n")
    (root / "minisgl" / "part.py").write_text("class Part:\n    def f(self):\n        return 1\n")
    chapter = root / "chapters" / "00-a-chapter.md"
    chapter.write_text(CHAPTER)
    notebook = pair(CHAPTER, root / "notebooks" / "none.ipynb")
    for count, cell in enumerate((cell for cell in notebook.cells if cell.cell_type == "code"), start=1):
        cell.execution_count = count
    code = code_cells(notebook)
    code[0].outputs = [nbformat.v4.new_output("stream", name="stdout", text="42\n")]
    code[1].outputs = [shown("def f(self):\n    return 1")]
    save(root, notebook)


def shown(code: str, line: int = 2) -> Any:
    """What a cell leaves that ends in a listing."""
    forms = dict.fromkeys(("text/markdown", "text/plain"), listing(code, line))
    return nbformat.v4.new_output("execute_result", forms, execution_count=2)


def load(root: Path) -> Any:
    return nbformat.read(root / "notebooks" / "00-a-chapter.ipynb", as_version=4)


def save(root: Path, notebook: Any) -> None:
    nbformat.write(notebook, root / "notebooks" / "00-a-chapter.ipynb")


def code_cells(notebook: Any) -> list[Any]:
    """Those of the chapter, without the one for hosted notebooks."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [cell for cell in code if HOSTED not in cell.metadata.get("tags", [])]
