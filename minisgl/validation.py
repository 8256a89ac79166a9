"""What a request must fulfil, checked at the edge, before anything is allocated for it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from minisgl.core.request import Int32Array
from minisgl.errors import ContextExceeded, InvalidRequest, check_type


def check_prompt(prompt: object, vocab_size: int) -> Int32Array:
    """Token ids as int32[len].

    Raises:
        InvalidRequest: not a non-empty list of integers below ``vocab_size``.
    """
    check_type("prompt", prompt, (Sequence, np.ndarray), "text or a list of token ids")
    assert isinstance(prompt, (Sequence, np.ndarray))
    if len(prompt) == 0:
        raise InvalidRequest("prompt", "must have at least one token")
    try:
        ids = _as_array(prompt)
    except ValueError as error:  # lists of different lengths inside
        raise InvalidRequest("prompt", "must be text or a flat list of integer token ids") from error
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise InvalidRequest("prompt", "must be text or a flat list of integer token ids")
    if ids.min() < 0 or ids.max() >= vocab_size:
        bad = int(ids[(ids < 0) | (ids >= vocab_size)][0])
        raise InvalidRequest("prompt", f"token id {bad} is outside of the vocabulary of {vocab_size} tokens")
    return ids.astype(np.int32)


def _as_array(prompt: Sequence[Any] | npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Whatever ``prompt`` holds, as NumPy sees it; a plain list of integers in half the time that NumPy takes."""
    if isinstance(prompt, list) and type(prompt[0]) is int:
        try:
            return np.frombuffer(array("q", prompt), dtype=np.int64)
        except (TypeError, OverflowError):  # not all are integers of 64 bits
            pass
    return np.asarray(prompt)


def check_lengths(prompt_len: int, max_tokens: int | None, min_tokens: int, max_seq_len: int) -> int:
    """Most tokens that the sequence may have, prompt included.

    Raises:
        ContextExceeded: prompt and output do not fit ``max_seq_len``.
        InvalidRequest: ``min_tokens`` exceed what may be generated.
    """
    room = max_seq_len - prompt_len
    if room < 1:
        raise ContextExceeded(
            "prompt", f"{prompt_len} tokens leave no room for output within max_seq_len of {max_seq_len}; shorten it"
        )
    if max_tokens is None:
        max_tokens = room
    if max_tokens > room:
        raise ContextExceeded(
            "max_tokens",
            f"{max_tokens} with a prompt of {prompt_len} tokens exceed max_seq_len of {max_seq_len}; {room} fit",
        )
    if min_tokens > max_tokens:
        raise InvalidRequest("min_tokens", f"{min_tokens} exceed the {max_tokens} tokens that may be generated")
    return prompt_len + max_tokens


def check_token_ids(field: str, token_ids: Iterable[int], vocab_size: int, limit: int) -> None:
    """Raise `InvalidRequest` if an id is outside of the vocabulary, or there are more than ``limit``."""
    ids = list(token_ids)
    if len(ids) > limit:
        raise InvalidRequest(field, f"has {len(ids)} token ids; at most {limit} are allowed")
    for token in ids:
        if not 0 <= token < vocab_size:
            raise InvalidRequest(field, f"token id {token} is outside of the vocabulary of {vocab_size} tokens")
