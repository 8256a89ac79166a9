from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import pytest

from tools.mdbook import main, preprocess, with_outputs

CHAPTER = """# A chapter

```python
f()
```

and so on.
"""


def notebook(*outputs: Any) -> Any:
    made = jupytext.reads(CHAPTER, fmt="md")
    made.cells[1].outputs = list(outputs)
    return made


def result(**data: str) -> Any:
    return nbformat.v4.new_output("execute_result", {key.replace("__", "/"): value for key, value in data.items()})


def test_printed_text_is_escaped_and_stands_below_its_cell() -> None:
    made = with_outputs(CHAPTER, notebook(nbformat.v4.new_output("stream", text="<|end|> & *so*\n\non\n")))
    assert made == (
        '# A chapter\n\n```python\nf()\n```\n\n<pre class="output">&lt;|end|&gt; &amp; *so*\n\non</pre>\n\nand so on.\n'
    )


def test_the_richest_form_is_shown() -> None:
    drawing = nbformat.v4.new_output("display_data", {"image/svg+xml": "<svg>\n\n</svg>", "text/plain": "words"})
    assert '<figure class="output"><svg></svg></figure>' in with_outputs(CHAPTER, notebook(drawing))
    assert "words" not in with_outputs(CHAPTER, notebook(drawing))
    made = with_outputs(CHAPTER, notebook(result(text__markdown="| a |\n| --- |", text__plain="words")))
    assert '<div class="output">\n\n| a |\n| --- |\n\n</div>' in made
    assert '<pre class="output">words</pre>' in with_outputs(CHAPTER, notebook(result(text__plain="words")))


def test_tags_of_a_cell_are_not_shown() -> None:
    text = CHAPTER.replace("```python\n", '```python tags=["measured"]\n')
    assert "measured" not in with_outputs(text, notebook())


def test_a_stale_notebook_is_refused() -> None:
    with pytest.raises(ValueError, match="not up to date"):
        with_outputs(CHAPTER.replace("f()", "g()"), notebook())


def test_preprocess_reaches_nested_chapters_and_leaves_others_alone(tmp_path: Path) -> None:
    (tmp_path / "notebooks").mkdir()
    nbformat.write(notebook(result(text__plain="deep")), tmp_path / "notebooks" / "01-b.ipynb")

    def chapter(path: str | None, *below: Any) -> dict[str, Any]:
        return {"Chapter": {"path": path, "content": CHAPTER, "sub_items": list(below)}}

    book = {"items": ["Separator", {"PartTitle": "Part"}, chapter(None), chapter("00-a.md", chapter("01-b.md"))]}
    first, second = preprocess({"root": str(tmp_path)}, book)["items"][2:]
    assert first["Chapter"]["content"] == second["Chapter"]["content"] == CHAPTER
    assert "deep" in second["Chapter"]["sub_items"][0]["Chapter"]["content"]


def test_only_the_html_renderer_is_supported() -> None:
    assert main(["preprocess", "supports", "html"]) == 0
    assert main(["preprocess", "supports", "markdown"]) == 1


def test_the_preprocessor_reads_and_writes_json(tmp_path: Path) -> None:
    book = {"items": [{"Chapter": {"path": "00-a.md", "content": CHAPTER, "sub_items": []}}]}
    command = [sys.executable, "-m", "tools.mdbook", "preprocess"]
    given = json.dumps([{"root": str(tmp_path)}, book])
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout) == book


@pytest.mark.parametrize(("message", "status"), [("INFO fine", 0), ("WARN a dead link", 1), ("ERROR gone", 1)])
def test_warnings_of_mdbook_fail_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str, status: int
) -> None:
    fake = tmp_path / "mdbook"
    fake.write_text(f"#!/bin/sh\necho '{message}' >&2\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert main([]) == status
