"""Log-probabilities: taken on the device beside the tokens, turned into `TokenLogprobs` on the host."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from minisgl.core.request import Int32Array, TokenLogprobs
from minisgl.engine.sampling_stages import A, HostSampling, LogprobStage


class Logprobs(NamedTuple, Generic[A]):
    """Log-probabilities of the L rows that asked, in the order of ``LogprobStage.rows``; K is its ``max_count``.

    Args:
        sampled: [L] of the sampled token.
        top: [L, K] of the likeliest tokens, best first.
        top_ids: [L, K] int32 their ids.
    """

    sampled: A
    top: A
    top_ids: A


def take_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, stage: LogprobStage[torch.Tensor]
) -> Logprobs[torch.Tensor]:
    """Log-softmax of the rows that asked, at the sampled and at the likeliest tokens.

    Args:
        logits: [S, vocab] as the model gave them, before any stage.
        tokens: [S] int64 sampled tokens.
        stage: names L of the rows.
    """
    rows = logits[stage.rows]
    if rows.dtype != torch.float64:
        rows = rows.float()
    normaliser = rows.logsumexp(-1, keepdim=True)
    sampled = rows.gather(-1, tokens[stage.rows].unsqueeze(-1)) - normaliser
    top, top_ids = rows.topk(min(stage.max_count, rows.shape[-1]))
    return Logprobs(sampled.squeeze(-1), top - normaliser, top_ids.int())


def token_logprobs(
    rows: HostSampling, tokens: Int32Array, logprobs: Logprobs[npt.NDArray[Any]] | None
) -> list[TokenLogprobs | None] | None:
    """Log-probabilities of a step for its requests.

    Args:
        rows: what the step was sampled with.
        tokens: int32[S] the step's tokens.
        logprobs: host copy of what the sampler returned.

    Returns:
        [S] entries, None for a row that did not ask; or None if no row asked. Equally likely tokens are listed in the
        order of their ids.
    """
    stage = rows.logprobs
    if stage is None or logprobs is None:
        return None
    result: list[TokenLogprobs | None] = [None] * len(tokens)
    by_id = np.argsort(logprobs.top_ids, axis=-1)
    order = np.take_along_axis(by_id, np.argsort(-np.take_along_axis(logprobs.top, by_id, -1), -1, kind="stable"), -1)
    ids = np.take_along_axis(logprobs.top_ids, order, -1).tolist()
    values = np.take_along_axis(logprobs.top, order, -1).tolist()
    for i, (row, count) in enumerate(zip(stage.rows.tolist(), stage.counts.tolist(), strict=True)):
        top = tuple(zip(ids[i][:count], values[i][:count], strict=True))
        result[row] = TokenLogprobs(int(tokens[row]), float(logprobs.sampled[i]), top)
    return result
