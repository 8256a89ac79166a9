"""How few tokens a text can have, told by its length: what is far too long is refused without being tokenized."""

from __future__ import annotations

import json
from typing import Any

_SHRINKING = {"Prepend": 1, "NFC": 4}
"""Normalizers that never make a text shorter, or at most so many times: no character decomposes into more than four
others (UAX #15, Unicode Normalization Forms), so composing takes no more than four together."""


def characters_per_token(backend: Any) -> int | None:
    """Most characters of a text that one token can stand for; None where that cannot be told.

    It can for BPE where a tokenizer neither drops nor swallows characters: the strings of its vocabulary have one
    character for each byte (byte-level) or character that they stand for.

    Args:
        backend: a tokenizer of transformers.
    """
    raw = getattr(backend, "backend_tokenizer", None)
    if raw is None:
        return None
    parts = json.loads(raw.to_str())
    shrinking = _shrinking(parts["normalizer"])
    added = parts["added_tokens"]
    swallows = any(token["lstrip"] or token["rstrip"] for token in added)
    if parts["model"]["type"] != "BPE" or shrinking is None or swallows or not _keeps_all(parts["pre_tokenizer"]):
        return None
    return shrinking * max(map(len, (*parts["model"]["vocab"], *(token["content"] for token in added))))


def _shrinking(normalizer: dict[str, Any] | None) -> int | None:
    """How many times shorter a normalizer can make a text; None if nobody knows."""
    match normalizer:
        case None:
            return 1
        case {"type": "Sequence", "normalizers": steps}:
            factors = [_shrinking(step) for step in steps]
            known = [factor for factor in factors if factor is not None]
            return max(known, default=1) if len(known) == len(factors) and sum(f > 1 for f in known) <= 1 else None
        case {"type": "Replace", "pattern": {"String": pattern}, "content": content} if len(content) >= len(pattern):
            return 1
        case {"type": kind}:
            return _SHRINKING.get(kind)
    return None


def _keeps_all(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Whether a pre-tokenizer only cuts: none of the text gets lost between the pieces."""
    match pre_tokenizer:
        case None | {"type": "ByteLevel" | "Digits" | "Metaspace"}:
            return True
        case {"type": "Split", "behavior": str(behavior)}:
            return behavior != "Removed"
        case {"type": "Sequence", "pretokenizers": steps}:
            return all(map(_keeps_all, steps))
    return False
