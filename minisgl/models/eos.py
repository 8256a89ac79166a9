"""Which tokens end a sequence, according to a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from minisgl.errors import ModelLoadError


def load_eos_ids(path: Path) -> tuple[int, ...]:
    """All end-of-sequence ids of the checkpoint in directory ``path``.

    ``generation_config.json`` knows best (chat models list several ids there), then ``config.json``, then the
    tokenizer's own end token. Empty if none of them names one.

    Raises:
        ModelLoadError: one of the files is no JSON object, or its ``eos_token_id`` is no integer and no list of them.
    """
    for name in ("generation_config.json", "config.json"):
        value = _read(path / name).get("eos_token_id")
        if value is not None:
            return _ids(value, path / name)
    return _tokenizer_eos(path)


def _ids(value: object, file: Path) -> tuple[int, ...]:
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        raise ModelLoadError(f"{file}: eos_token_id must be an integer or a list of integers, got {value!r}")
    return tuple(items)


def _tokenizer_eos(path: Path) -> tuple[int, ...]:
    token = _read(path / "tokenizer_config.json").get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    added = _read(path / "tokenizer.json").get("added_tokens", [])
    return tuple(entry["id"] for entry in added if entry["content"] == text)


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{file} is not valid JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} must hold a JSON object, got {type(content).__name__}; download it again")
    return content
