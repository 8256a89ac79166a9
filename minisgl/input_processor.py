"""From token ids and parameters to requests that the scheduler can take: all checks happen here, none later."""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from minisgl.config import EngineConfig
from minisgl.errors import ContextExceeded, InvalidRequest, check_token_ids, check_type
from minisgl.grammar import Grammars
from minisgl.kvcache.sizing import most_pages
from minisgl.request import Int32Array, Request
from minisgl.sampling_params import SamplingParams
from minisgl.tokenizer import Tokenizer


class InputProcessor:
    """Checks prompts and parameters, and makes numbered requests of them. It allocates no slot and no page.

    ``max_kv_tokens`` fit the KV cache, ``max_seq_len`` a sequence; ``max_stop_ids`` tokens at most may end a request.
    No layer sees more than ``window`` positions; None: some layer sees all.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        max_seq_len: int,
        max_kv_tokens: int,
        window: int | None,
        num_draft_tokens: int,
        max_stop_ids: int,
    ) -> None:
        self.eos_ids = tuple(token for token in tokenizer.eos_ids if token < vocab_size)  # they end a sequence
        self.grammars = Grammars(tokenizer, vocab_size, self.eos_ids)
        self.next_uid = 0
        self._timeout = config.request_timeout
        self._has_text = tokenizer.available
        self._vocab_size = vocab_size
        self._max_seq_len = max_seq_len
        self._max_kv_tokens = max_kv_tokens
        self._window = window
        self._num_draft_tokens = num_draft_tokens
        self._page_size = config.page_size
        self._max_stop_ids = max_stop_ids
        self._seeds = random.Random(config.seed)

    def process(
        self, prompt: Sequence[int], params: SamplingParams, streaming: bool = False, user: str = ""
    ) -> list[Request]:
        """Check a prompt of token ids and its parameters, and make its ``params.n`` requests.

        Args:
            streaming: report each token as it comes.
            user: client that the requests are for, for policies that are fair to users.

        Raises:
            InvalidRequest: naming the field and its limit.
        """
        check_type("params", params, SamplingParams, "SamplingParams")
        tokens = check_prompt(prompt, self._vocab_size)
        max_len = check_lengths(len(tokens), params.max_tokens, params.min_tokens, self._max_seq_len)
        if params.max_tokens is None and not self._fits(len(tokens), max_len):  # one token is the least to ask for
            max_len = max(len(tokens) + 1, min(max_len, self._max_kv_tokens + 1))
        stop_ids = self._stop_ids(params)
        check_token_ids("logit_bias", params.logit_bias or (), self._vocab_size, limit=self._vocab_size)
        if params.stop and not self._has_text:
            raise InvalidRequest("stop", "stop strings need a tokenizer and this model has none; use stop_token_ids")
        seed = self._seeds.getrandbits(62) if params.seed is None else params.seed
        requests = []
        for index in range(params.n):
            request = Request(
                uid=self.next_uid,
                prompt=tokens,
                params=params,
                max_len=max_len,
                stop_ids=stop_ids,
                seed=(seed + index) % 2**63,
                watched=streaming or bool(params.stop) or params.logprobs is not None,
                deadline=None if self._timeout is None else time.perf_counter() + self._timeout,
                user=user,
                constraint=self.grammars.constraint(params),
            )
            self.next_uid += 1
            requests.append(request)
        return requests

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        eos_ids = () if params.ignore_eos else self.eos_ids
        check_token_ids("stop_token_ids", params.stop_token_ids, self._vocab_size, self._max_stop_ids - len(eos_ids))
        return tuple(dict.fromkeys((*eos_ids, *params.stop_token_ids)))

    def check_fits(self, request: Request) -> None:
        """Raise `ContextExceeded` for a request that the KV cache could never hold, even in an idle engine.

        The server calls this before it accepts a request; with `LLM.generate`, the request ends in the queue with
        ``finish_reason`` ``"error"``, and the other prompts succeed.
        """
        capacity = self._max_kv_tokens
        if self._fits(request.prompt_len, request.max_len):
            return
        if request.prompt_len > capacity:
            raise ContextExceeded("prompt", f"{request.prompt_len} tokens do not fit the KV cache of {capacity} tokens")
        room = capacity + 1 - request.prompt_len
        raise ContextExceeded(
            "max_tokens",
            f"{request.max_len - request.prompt_len} with a prompt of {request.prompt_len} tokens exceed the KV cache "
            f"of {capacity} tokens; at most {room} fit",
        )

    def _fits(self, prompt_len: int, max_len: int) -> bool:
        pages = most_pages(prompt_len, max_len, self._page_size, self._window, self._num_draft_tokens)
        return pages * self._page_size <= self._max_kv_tokens


def check_prompt(prompt: object, vocab_size: int) -> Int32Array:
    """Return token ids as int32[len]; `InvalidRequest` unless a non-empty list of integers below ``vocab_size``."""
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


def check_lengths(prompt_len: int, max_tokens: int | None, min_tokens: int, max_seq_len: int) -> int:
    """Return the most tokens that the sequence may have, prompt included.

    Raises:
        ContextExceeded: prompt and output do not fit ``max_seq_len``.
        InvalidRequest: ``min_tokens`` exceed what may be generated.
    """
    room = max_seq_len - prompt_len
    if room < 1:
        raise ContextExceeded(
            "prompt",
            f"{prompt_len} tokens leave no room for output within max_seq_len of {max_seq_len}; shorten it to "
            f"{max_seq_len - 1}, as at least one token is generated, even if it is not shown",
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


def _as_array(prompt: Sequence[Any] | npt.NDArray[Any]) -> npt.NDArray[Any]:
    if isinstance(prompt, list) and type(prompt[0]) is int:  # in half the time that NumPy takes for a list
        try:
            return np.frombuffer(struct.pack(f"{len(prompt)}q", *prompt), dtype=np.int64)
        except struct.error:  # not all are integers of 64 bits
            pass
    return np.asarray(prompt)
