"""``echo``: prompts that come back before their continuations, with the log-probabilities of their tokens if wanted.

The engine reports log-probabilities of tokens that it samples. A prompt's are found by letting it sample them: one
request of one token for each beginning of the prompt, which a bias forces to the token that follows there. The prefix
cache has nearly all of each beginning, so this costs a few tokens of prefill for each token of the prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from minisgl.core.request import TokenLogprobs
from minisgl.core.sampling_params import SamplingParams
from minisgl.server.async_engine import AsyncEngine
from minisgl.server.completion_format import Echo
from minisgl.server.formats import LEAST_LOGPROB
from minisgl.server.text_service import TextService

AT_ONCE = 64
"""Beginnings of a prompt that are in the engine's queue together."""

_FORCE = 100.0


async def echo(engine: AsyncEngine, texts: TextService, prompt: str | list[int], num_logprobs: int | None) -> Echo:
    """What a prompt looks like when it comes back.

    Args:
        engine: has the model.
        texts: has the tokenizer.
        prompt: text or token ids.
        num_logprobs: likeliest tokens to report at every position; None is no log-probabilities.

    Raises:
        InvalidRequest, QueueFull, EngineDead, GenerationFailed: from the engine.
    """
    text = prompt if isinstance(prompt, str) else await texts.detokenize(prompt)
    if num_logprobs is None:
        return Echo(text)
    token_ids = await texts.tokenize(prompt) if isinstance(prompt, str) else prompt
    logprobs: list[TokenLogprobs] = []
    for start in range(1, len(token_ids), AT_ONCE):
        lengths = range(start, min(start + AT_ONCE, len(token_ids)))
        scores = (_score(engine, token_ids[:length], token_ids[length], num_logprobs) for length in lengths)
        logprobs += await asyncio.gather(*scores)
    return Echo(text, token_ids, logprobs)


async def _score(engine: AsyncEngine, before: Sequence[int], token_id: int, num_logprobs: int) -> TokenLogprobs:
    """The log-probability of ``token_id`` after ``before``, and of the likeliest tokens there."""
    params = SamplingParams(
        max_tokens=1, temperature=0.0, logit_bias={token_id: _FORCE}, logprobs=num_logprobs, ignore_eos=True
    )
    answer = await engine.submit([before], params, streaming=False)
    try:
        (update,) = [update async for update in answer.updates()]
    finally:
        answer.abort()
    (entry,) = update.logprobs
    # Where even the bias has not lifted it to the top, the token is as good as impossible.
    return entry if entry.token_id == token_id else TokenLogprobs(token_id, LEAST_LOGPROB, entry.top)
