"""What the tests of structured output have in common: grammars, and an engine of random weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minisgl.llm import LLM
from minisgl.outputs import RequestOutput

CAT = "the cat and"
DATE = r"(19|20)\d\d-[01]\d"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["café", "你好", 'a "b"']}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMA = json.dumps(PERSON)
SIZES: dict[str, Any] = {"page_size": 4, "num_pages": 1024, "dtype": "float64", "device": "cpu"}


def make(path: Path, **options: Any) -> LLM:
    return LLM(path, **{**SIZES, **options})


def tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.completions]
