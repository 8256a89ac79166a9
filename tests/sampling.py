"""Sampling rows as a test writes them down, run through the sampling table and a sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from minisgl.batch import NewRequest
from minisgl.engine.sampler import Logprobs, Sampler, token_logprobs
from minisgl.engine.sampling import DeviceSampling, HostSampling, SamplingTable, TokenHistory
from minisgl.request import TokenLogprobs
from minisgl.sampling_params import SamplingParams
from tests.rule import mask_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Where samplers run."""

MASK_WORDS = 32
"""Enough for the vocabularies of these tests."""


@dataclass(frozen=True)
class Row:
    """One sampling row: a request that has generated ``output`` so far.

    Args:
        params, prompt, output, stop_ids, seed: of the request.
        index: how many tokens it has generated, if that shall be more than ``output`` shows.
        allowed: the tokens that a constraint lets it sample; None is all.
    """

    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    prompt: tuple[int, ...] = (0,)
    output: tuple[int, ...] = ()
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    index: int | None = None
    allowed: tuple[int, ...] | None = None

    @property
    def output_index(self) -> int:
        return len(self.output) if self.index is None else self.index


def prepare(
    rows: Sequence[Row], slots: Sequence[int] | None = None, device: str = "cpu"
) -> tuple[HostSampling, DeviceSampling, TokenHistory | None]:
    """What the engine would hand to the sampler for ``rows``, which are put into ``slots`` (0, 1, 2 … by default)."""
    where = list(range(len(rows))) if slots is None else list(slots)
    table = SamplingTable(max(where) + 1)
    # Token 1 behind a sequence's end must not be counted.
    tokens = torch.ones(max(where) + 1, 64, dtype=torch.int32)
    for slot, row in zip(where, rows, strict=True):
        ids = np.array(row.prompt + row.output, dtype=np.int32)
        table.admit(NewRequest(slot, ids, len(row.prompt), row.params, row.stop_ids, row.seed))
        tokens[slot, : len(ids)] = torch.from_numpy(ids)
    index = np.array([row.output_index for row in rows], dtype=np.int32)
    host = table.rows(np.array(where, dtype=np.int32), index)
    masks = {i: mask_of(row.allowed, MASK_WORDS) for i, row in enumerate(rows) if row.allowed is not None}
    if masks:
        host = host.constrained(np.array(list(masks), dtype=np.int32), np.concatenate(list(masks.values())))
    inputs = host.unpack(torch.from_numpy(host.pack()).to(device))
    return host, inputs, inputs.history(tokens.to(device))


def sample(
    sampler: Sampler, logits: torch.Tensor, rows: Sequence[Row], slots: Sequence[int] | None = None
) -> list[int]:
    """Sampled token of each row; ``logits`` is [len(rows), vocab], or [vocab] for the same in every row."""
    _, inputs, history = prepare(rows, slots, DEVICE)
    return sampler.sample(logits.to(DEVICE).expand(len(rows), -1), inputs, history).tokens.tolist()


def sample_with_logprobs(
    sampler: Sampler, logits: torch.Tensor, rows: Sequence[Row]
) -> tuple[list[int], list[TokenLogprobs | None] | None]:
    """Sampled tokens and their log-probabilities."""
    host, inputs, history = prepare(rows, device=DEVICE)
    tokens, logprobs = sampler.sample(logits.to(DEVICE).expand(len(rows), -1), inputs, history)
    on_host = None if logprobs is None else Logprobs(*(part.cpu().numpy() for part in logprobs))
    return tokens.tolist(), token_logprobs(host, tokens.cpu().numpy(), on_host)


def fits(counts: torch.Tensor, probabilities: torch.Tensor) -> bool:
    """Pearson's chi-square test at the level 0.001; False also if something of probability 0 was drawn.

    Args:
        counts: [n] how often each outcome was drawn.
        probabilities: [n] what they should be; outcomes that are expected less than five times are put together.
    """
    if counts[probabilities == 0].any():
        return False
    expected = probabilities.double() / probabilities.double().sum() * counts.sum()
    rare = expected < 5
    observed = torch.cat([counts[~rare], counts[rare].sum().reshape(1)]).double()
    expected = torch.cat([expected[~rare], expected[rare].sum().reshape(1)])
    used = expected > 0
    statistic = ((observed - expected)[used] ** 2 / expected[used]).sum()
    freedom = (used.sum() - 1).double()
    if freedom == 0:
        return True
    return bool(torch.special.gammaincc(freedom / 2, statistic / 2) > 0.001)
