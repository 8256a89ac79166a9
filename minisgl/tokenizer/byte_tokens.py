"""Tokens that spell one byte each, with which a tokenizer of whole words still writes every character (Llama 2)."""

from __future__ import annotations

from typing import Any

_PROBE = "🦊"
"""A character of four bytes, to see whether byte tokens are read as bytes."""


def find_byte_tokens(backend: Any) -> dict[int, int]:
    """Token id → byte, for the bytes of characters beyond ASCII; empty if the tokenizer has no byte fallback.

    The tokens of ASCII bytes are left out: each is a whole character, and so as good as a word.

    Args:
        backend: a tokenizer of transformers.
    """
    values = range(0x80, 0x100)
    ids = backend.convert_tokens_to_ids([f"<0x{value:02X}>" for value in values])
    tokens = dict(zip(ids, values, strict=True))
    if None in tokens or len(tokens) < len(values):
        return {}
    by_value = {value: token_id for token_id, value in tokens.items()}
    spelled: str = backend.decode([by_value[value] for value in _PROBE.encode()])
    return tokens if spelled.strip() == _PROBE else {}


def complete_characters(data: bytes) -> tuple[str, bytes]:
    """The text of ``data``, and the bytes at its end that may still become a character.

    Each byte that belongs to no character becomes one U+FFFD.
    """
    text = ""
    while True:
        try:
            return text + data.decode(), b""
        except UnicodeDecodeError as error:
            text += data[: error.start].decode()
            if error.reason == "unexpected end of data":
                return text, data[error.start :]
            text += "\ufffd" * (error.end - error.start)
            data = data[error.end :]
