"""The sampling kernels against the race of `minisgl.engine.random` in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from minisgl.engine.random import draw_keys, exponentials, splitmix64, token_hash
from minisgl.engine.sampler import DefaultSampler, FusedSampler
from minisgl.engine.sampling import RandomStage
from minisgl.kernels.launch import INTERPRETED
from minisgl.kernels.sampling import _log_exponential, sample_tokens
from minisgl.kernels.top_p import Thresholds
from minisgl.sampling_params import SamplingParams
from tests.kernels.closeness import DEVICE, every_dtype, random, spread
from tests.sampling import Row, sample

Random = RandomStage[torch.Tensor]


def random_stage(temperatures: Sequence[float], output_index: int = 0) -> Random:
    keys = splitmix64(np.arange(len(temperatures), dtype=np.uint64))
    low, high = draw_keys(keys, np.full(len(temperatures), output_index, dtype=np.int32))
    parts = torch.tensor(temperatures), torch.from_numpy(low), torch.from_numpy(high)
    return RandomStage(*(part.to(DEVICE) for part in parts))


def sampled(logits: torch.Tensor, stage: Random | None) -> torch.Tensor:
    out = torch.full((len(logits),), -1, dtype=torch.int32, device=logits.device)
    sample_tokens(logits, stage, out)
    return out.long()


def scores(logits: torch.Tensor, stage: Random) -> torch.Tensor:
    """What the race compares, in float64: ``logit / T − log(time)``, the logit itself in a greedy row."""
    times = exponentials(token_hash(stage.key_low, stage.key_high, logits.shape[1])).double()
    temperature = stage.temperature.double().unsqueeze(-1)
    return torch.where(temperature == 0, logits.double(), logits.double() / temperature - times.log())


def assert_first(logits: torch.Tensor, stage: Random, tokens: torch.Tensor) -> None:
    """Each token is the first of its race, or within rounding error of it."""
    race = scores(logits, stage)
    behind = race.amax(-1) - race.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    allowed = 1e-5 * (1 + (logits.double() / stage.temperature.double().clamp(min=0.01).unsqueeze(-1)).abs().amax(-1))
    assert (behind <= allowed).all()


@every_dtype
@pytest.mark.parametrize("vocab", [1, 7, 1000, 1024, 5003])
def test_every_row_takes_the_first_of_its_race(dtype: torch.dtype, vocab: int) -> None:
    logits = random(9, vocab, dtype=dtype) * 3
    stage = random_stage([0.0, 0.01, 0.3, 0.7, 1.0, 1.0, 2.0, 100.0, 0.0])
    tokens = sampled(logits, stage)
    assert_first(logits, stage, tokens)
    assert tokens[[0, -1]].tolist() == logits[[0, -1]].argmax(-1).tolist()


@every_dtype
def test_greedy_takes_the_largest(dtype: torch.dtype) -> None:
    logits = random(5, 3001, dtype=dtype)
    assert sampled(logits, None).tolist() == logits.double().argmax(-1).tolist()


def test_among_equal_logits_the_lowest_id_wins_wherever_it_lies() -> None:
    logits = torch.zeros(4, 2500, device=DEVICE)
    logits[1, [1023, 1024, 2499]] = 1.0
    logits[2, [1030, 2400]] = 1.0
    logits[3, 2499] = 1.0
    assert sampled(logits, None).tolist() == [0, 1023, 1030, 2499]


def test_a_token_at_minus_infinity_never_wins() -> None:
    logits = random(16, 2100, dtype=torch.float32)
    logits[:, ::2] = float("-inf")
    logits[0, :2099] = float("-inf")
    tokens = sampled(logits, random_stage([100.0] * 16))
    assert (tokens % 2 == 1).all()
    assert tokens[0] == 2099


@pytest.mark.parametrize("bad", [float("-inf"), float("nan"), float("inf")])
def test_rows_without_a_distribution_still_give_a_token(bad: float) -> None:
    logits = torch.full((3, 1500), bad, device=DEVICE)
    for stage in (None, random_stage([0.0, 1.0, 0.5])):
        tokens = sampled(logits, stage)
        assert ((tokens >= 0) & (tokens < 1500)).all()


def test_what_lies_below_a_threshold_is_not_drawn_and_of_what_equals_it_the_first() -> None:
    logits = torch.zeros(6, 2100, device=DEVICE)
    logits[:, ::100] = 5.0
    logits[4:, 77] = 5.5
    last_tied = torch.tensor([0, 1499, 1500, 2100, -1, 0], dtype=torch.int32, device=DEVICE)
    thresholds = Thresholds(torch.full((6,), 5.0, device=DEVICE), last_tied)
    expected = [{0}, set(range(0, 1401, 100)), set(range(0, 1501, 100)), set(range(0, 2001, 100)), {77}, {0, 77}]
    drawn: list[set[int]] = [set() for _ in expected]
    for index in range(40):
        out = torch.empty(6, dtype=torch.int32, device=DEVICE)
        sample_tokens(logits, random_stage([100.0] * 6, index), out, thresholds)
        for tokens, token in zip(drawn, out.tolist(), strict=True):
            tokens.add(token)
    assert all(tokens <= allowed for tokens, allowed in zip(drawn, expected, strict=True))
    assert all(len(tokens) > len(allowed) // 2 for tokens, allowed in zip(drawn, expected, strict=True))


def test_nan_loses_against_a_number() -> None:
    logits = torch.full((1, 1500), torch.nan, device=DEVICE)
    logits[0, 1200] = -5.0
    assert sampled(logits, None).tolist() == [1200]


def test_rows_may_lie_apart_or_be_one_and_the_same() -> None:
    logits, stage = random(6, 1300, dtype=torch.float32), random_stage([1.0] * 6)
    assert torch.equal(sampled(spread(logits), stage), sampled(logits, stage))
    same = logits[:1].expand(6, -1)
    assert torch.equal(sampled(same, stage), sampled(same.contiguous(), stage))


def test_no_rows_are_no_work() -> None:
    assert sampled(torch.empty(0, 50, device=DEVICE), None).tolist() == []


@triton.jit
def log_exponential_kernel(hash_ptr: tl.tensor, out_ptr: tl.tensor, SIZE: tl.constexpr, FAST_LOG: tl.constexpr) -> None:
    index = tl.arange(0, SIZE)
    tl.store(out_ptr + index, _log_exponential(tl.load(hash_ptr + index), FAST_LOG))


def test_times_are_those_of_the_twin_over_their_whole_range() -> None:
    """Down to 2**-32, and where the series ends and the logarithm begins: at 1/16, which is hash 2**27."""
    edges = [0, 1, 2, 2**27 - 2, 2**27 - 1, 2**27, 2**27 + 1, 2**31 - 2, 2**31 - 1, 2**31, 2**32 - 1]
    spaced = [2**30 // 3 * i // 1000 for i in range(2048 - len(edges))]
    hashes = torch.tensor(edges + spaced).to(torch.int32).to(DEVICE)
    out = torch.empty(2048, device=DEVICE)
    log_exponential_kernel[(1,)](hashes, out, SIZE=2048, FAST_LOG=not INTERPRETED)
    torch.testing.assert_close(out.double(), exponentials(hashes).double().log(), rtol=1e-6, atol=5e-6)


def test_draws_the_tokens_of_the_default_sampler() -> None:
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7),
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=20, min_p=0.05),
        SamplingParams(repetition_penalty=1.3, logit_bias={3: 2.0}, logprobs=3),
        SamplingParams(temperature=1.5, min_tokens=4),
    ]
    rows = [Row(kinds[i % 6], prompt=(1, 2), output=(3,), stop_ids=(5,), seed=i) for i in range(48)]
    logits = random(48, 1200, dtype=torch.float32).cpu() * 2
    for dtype in (torch.float32, torch.bfloat16):
        narrow = logits.to(dtype)
        assert sample(FusedSampler(), narrow.to(DEVICE), rows) == sample(DefaultSampler(), narrow, rows)
