"""From a prompt and its parameters to requests that the scheduler can take: all checks happen here, none later."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from minisgl.core.config import EngineConfig
from minisgl.core.request import Request
from minisgl.core.sampling_params import SamplingParams
from minisgl.errors import InvalidRequest, check_type
from minisgl.generation import Generation
from minisgl.grammar import Grammars
from minisgl.tokenizer import Tokenizer
from minisgl.validation import check_lengths, check_prompt, check_token_ids

Prompt = str | Sequence[int]


class Preparer:
    """Makes generations, and numbers their requests. It allocates nothing for them.

    Args:
        config: options of the engine.
        tokenizer: the model's.
        vocab_size: of the model.
        max_seq_len: tokens of the longest sequence.
        max_kv_tokens: tokens that the KV cache has room for.
        max_stop_ids: tokens that may end a request.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer,
        vocab_size: int,
        max_seq_len: int,
        max_kv_tokens: int,
        max_stop_ids: int,
    ) -> None:
        self.eos_ids = tuple(token for token in tokenizer.eos_ids if token < vocab_size)
        """Tokens that end a sequence of this model."""
        self.grammars = Grammars(tokenizer, vocab_size, self.eos_ids)
        self.next_uid = 0
        """Number of the next request."""
        self._timeout = config.request_timeout
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_seq_len = max_seq_len
        self._max_kv_tokens = max_kv_tokens
        self._max_stop_ids = max_stop_ids
        self._seeds = random.Random(config.seed)

    def prepare(self, prompt: Prompt, params: SamplingParams, streaming: bool, user: str) -> list[Generation]:
        """See `minisgl.LLM.prepare`."""
        check_type("params", params, SamplingParams, "SamplingParams")
        token_ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        tokens = check_prompt(token_ids, self._vocab_size)
        max_len = check_lengths(len(tokens), params.max_tokens, params.min_tokens, self._max_seq_len)
        eos_ids = () if params.ignore_eos else self.eos_ids
        if params.max_tokens is None:  # the KV cache may have room for less; one token is the least to ask for
            max_len = max(len(tokens) + 1, min(max_len, self._max_kv_tokens + 1))
        stop_ids = tuple(dict.fromkeys((*eos_ids, *params.stop_token_ids)))
        check_token_ids("stop_token_ids", params.stop_token_ids, self._vocab_size, self._max_stop_ids - len(eos_ids))
        check_token_ids("logit_bias", params.logit_bias or (), self._vocab_size, limit=self._vocab_size)
        if params.stop and not self._tokenizer.available:
            raise InvalidRequest("stop", "stop strings need a tokenizer and this model has none; use stop_token_ids")
        seed = self._seeds.getrandbits(62) if params.seed is None else params.seed
        generations = []
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
            generations.append(Generation(request, self._tokenizer, index, streaming))
        return generations
