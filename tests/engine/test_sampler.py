"""The default sampler's stages against transformers' logits processors, naive loops and exact distributions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from minisgl.engine.logits_processors import count_tokens, keep_min_p, keep_top, penalise, softmax_weights
from minisgl.engine.random import draw, draw_keys, exponentials, splitmix64, token_hash
from minisgl.engine.sampler import SAMPLERS, DefaultSampler, FusedSampler
from minisgl.engine.sampling import TokenHistory
from minisgl.errors import ConfigError
from minisgl.registry import resolve
from minisgl.sampling_params import SamplingParams
from tests.sampling import Row, fits, prepare, sample, sample_with_logprobs


def random_logits(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def weights_of(logits: torch.Tensor, rows: list[Row]) -> torch.Tensor:
    """What the draw is made from."""
    _, inputs, _ = prepare(rows)
    assert inputs.random is not None
    weights = softmax_weights(logits, inputs.random.temperature)
    if inputs.top is not None:
        weights = keep_top(weights, logits, inputs.top)
    if inputs.min_p is not None:
        weights = keep_min_p(weights, inputs.min_p)
    return weights


def reference(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities according to transformers; logits and result are [S, vocab]."""
    processors: list[Any] = [TemperatureLogitsWarper(params.temperature)]
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    for processor in processors:
        logits = processor(torch.zeros(len(logits), 1, dtype=torch.long), logits)
    return logits.softmax(-1)


def test_default_is_registered() -> None:
    assert isinstance(resolve("sampler", "default", SAMPLERS)(), DefaultSampler)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.7),
        SamplingParams(top_k=1),
        SamplingParams(top_k=17, temperature=0.8),
        SamplingParams(top_k=300),
        SamplingParams(top_p=0.5),
        SamplingParams(top_p=0.95, temperature=2.0),
        SamplingParams(top_p=1e-6),
        SamplingParams(min_p=0.02),
        SamplingParams(min_p=1.0),
        SamplingParams(top_k=20, top_p=0.9, temperature=0.7),
        SamplingParams(top_k=50, top_p=0.8, min_p=0.05, temperature=1.3),
    ],
)
def test_probabilities_equal_those_of_transformers(params: SamplingParams) -> None:
    logits = random_logits(40, 300)
    weights = weights_of(logits, [Row(params)] * 40)
    expected = reference(logits, params)
    assert torch.equal(weights > 0, expected > 0)
    torch.testing.assert_close(weights / weights.sum(-1, keepdim=True), expected)


def test_filters_of_one_row_leave_the_others_alone() -> None:
    logits = random_logits(4, 300)
    params = [SamplingParams(), SamplingParams(top_k=4), SamplingParams(top_p=0.6), SamplingParams(top_k=9, min_p=0.2)]
    weights = weights_of(logits, [Row(one) for one in params])
    for row, one in enumerate(params):
        alone = weights_of(logits[row : row + 1], [Row(one)])
        assert torch.equal(weights[row], alone[0])
        assert torch.equal(weights[row] > 0, reference(logits[row : row + 1], one)[0] > 0)


def test_repetition_penalty_equals_that_of_transformers() -> None:
    logits = random_logits(1, 100)
    prompt, output = (5, 6, 7, 7), (9, 5)
    _, inputs, history = prepare([Row(SamplingParams(repetition_penalty=1.7), prompt, output)])
    assert inputs.penalties is not None
    assert history is not None
    processor = RepetitionPenaltyLogitsProcessor(1.7)
    expected = processor(torch.tensor([prompt + output]), logits.clone())
    torch.testing.assert_close(penalise(logits, inputs.penalties, history), expected)


@settings(max_examples=60)
@given(
    sequence=st.lists(st.integers(0, 9), min_size=1, max_size=30),
    data=st.data(),
)
def test_token_counts_equal_a_loop(sequence: list[int], data: st.DataObject) -> None:
    prompt_len = data.draw(st.integers(1, len(sequence)))
    table = torch.full((3, 40), 4, dtype=torch.int32)
    table[2, : len(sequence)] = torch.tensor(sequence)
    lengths = torch.tensor([prompt_len]), torch.tensor([len(sequence)])
    width = data.draw(st.integers(len(sequence), 40))
    generated, seen = count_tokens(TokenHistory(table, torch.tensor([2]), *lengths, width), 10, torch.float32)
    output = sequence[prompt_len:]
    assert generated[0].tolist() == [output.count(token) for token in range(10)]
    assert seen[0].tolist() == [token in sequence for token in range(10)]


def keys_of(seeds: Sequence[int], output_index: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    keys = splitmix64(np.array(seeds, dtype=np.uint64))
    low, high = draw_keys(keys, np.full(len(seeds), output_index, dtype=np.int32))
    return torch.from_numpy(low), torch.from_numpy(high)


@settings(max_examples=200)
@given(
    weights=st.lists(st.sampled_from([0.0, 0.0, 1e-30, 1e-7, 0.1, 1.0]), min_size=1, max_size=300).filter(any),
    seed=st.integers(0, 2**63 - 1),
)
def test_a_token_of_weight_zero_is_never_drawn(weights: list[float], seed: int) -> None:
    token = draw(torch.tensor([weights]), *keys_of([seed]))
    assert weights[int(token)] > 0


@settings(max_examples=100)
@given(
    logits=st.lists(st.sampled_from([-20.0, -1.0, 0.0, 0.5, 3.0, float("-inf")]), min_size=1, max_size=200),
    top_k=st.integers(0, 210),
    top_p=st.floats(1e-9, 1.0),
    min_p=st.floats(0.0, 1.0),
    temperature=st.floats(0.001, 100.0),
    seed=st.integers(0, 2**63 - 1),
)
def test_the_sampled_token_is_in_the_kept_set(
    logits: list[float], top_k: int, top_p: float, min_p: float, temperature: float, seed: int
) -> None:
    if max(logits) == float("-inf"):
        logits[0] = 0.0
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, temperature=temperature)
    [token] = sample(DefaultSampler(), torch.tensor([logits]), [Row(params, seed=seed)])
    likelier = sum(logit > logits[token] for logit in logits) + logits[:token].count(logits[token])
    probabilities = (torch.tensor(logits).double() / max(temperature, 0.01)).softmax(-1)
    assert logits[token] > float("-inf")
    assert likelier < (top_k or len(logits))
    assert probabilities[token] >= min_p * probabilities.max() * (1 - 1e-5)
    order = sorted(range(len(logits)), key=lambda t: (-logits[t], t))
    kept_by_k = probabilities[order[: top_k or None]]
    assert likelier == 0 or kept_by_k[:likelier].sum() < top_p * kept_by_k.sum() + 1e-5


def test_token_hashes_are_those_of_64_bit_arithmetic() -> None:
    def mix(bits: int) -> int:
        bits = (bits ^ bits >> 16) * 0x85EBCA6B % 2**32
        bits = (bits ^ bits >> 13) * 0xC2B2AE35 % 2**32
        return bits ^ bits >> 16

    low, high = keys_of([0, 5, 2**63 - 1], output_index=3)
    hashes = token_hash(low, high, 1000)
    for row in range(3):
        low_bits, high_bits = int(low[row]) % 2**32, int(high[row]) % 2**32
        expected = [mix(mix((t * 0x9E3779B1 + low_bits) % 2**32) ^ high_bits) for t in range(1000)]
        assert (hashes[row].long() % 2**32).tolist() == expected


def test_the_extremes_of_the_hash_give_finite_positive_times() -> None:
    times = exponentials(torch.tensor([0, 1, 2**31 - 1, -1, -(2**31)], dtype=torch.int32))
    assert times.isfinite().all()
    assert (times > 0).all()


def test_times_are_exponentially_distributed() -> None:
    times = exponentials(token_hash(*keys_of(range(20)), 50_000)).double().flatten()
    counts = torch.histc((1 - torch.exp(-times)) * 1000, bins=1000, min=0, max=1000).long()
    assert fits(counts, torch.full((1000,), 1e-3))


def test_times_of_neighbouring_tokens_rows_and_steps_are_independent() -> None:
    here = token_hash(*keys_of(range(50)), 2000).double()
    later = token_hash(*keys_of(range(50), output_index=1), 2000).double()
    for other in (here.roll(1, dims=1), here.roll(1, dims=0), later):
        assert abs(float(torch.corrcoef(torch.stack([here.flatten(), other.flatten()]))[0, 1])) < 0.015


def test_draws_from_a_large_vocabulary_fit_its_distribution() -> None:
    vocab, draws = 150_001, 2_000
    weights = 1.0 / torch.arange(1, vocab + 1)
    weights = weights[torch.randperm(vocab, generator=torch.Generator().manual_seed(1))]
    weights /= weights.max()
    parts = [range(start, start + 50) for start in range(0, draws, 50)]
    tokens = torch.cat([draw(weights.expand(50, -1), *keys_of(part)) for part in parts])
    counts = torch.bincount(tokens, minlength=vocab)
    assert fits(counts, weights)
    group = torch.arange(vocab) // 2000  # and again with every group of neighbours frequent enough to be judged
    shape = int(group.max()) + 1
    assert fits(
        torch.zeros(shape, dtype=torch.long).scatter_add(0, group, counts),
        torch.zeros(shape).scatter_add(0, group, weights),
    )


def test_rounding_errors_in_the_logits_do_not_change_a_draw() -> None:
    """Another batch shape moves logits by about 1e-6: a draw that depends on sums over the vocabulary would change."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 49_152, generator=generator) * 2
    noisy = logits + 1e-6 * torch.randn(logits.shape, generator=generator)
    rows = [Row(SamplingParams(temperature=1.0), seed=seed) for seed in range(300)]
    assert sample(DefaultSampler(), logits, rows) == sample(DefaultSampler(), noisy, rows)


@pytest.mark.parametrize("bad", [float("-inf"), float("nan"), float("inf")])
def test_rows_without_a_distribution_still_give_a_token(bad: float) -> None:
    logits = torch.full((3, 300), bad)
    rows = [Row(SamplingParams(top_k=5)), Row(SamplingParams(min_p=0.5)), Row()]
    assert all(0 <= token < 300 for token in sample(DefaultSampler(), logits, rows))


def test_double_precision_logits_are_compared_in_double_precision() -> None:
    logits = torch.ones(4, dtype=torch.float64)
    logits[3] += 1e-12
    biased = SamplingParams(temperature=0.0, logit_bias={0: 0.0})
    greedy = [Row(), Row(biased), Row(SamplingParams(top_k=1))]
    assert sample(DefaultSampler(), logits, greedy) == [3, 3, 3]


def test_tied_logprobs_are_listed_by_token_id() -> None:
    logits = torch.tensor([0.0, 2.0] * 10)
    _, logprobs = sample_with_logprobs(DefaultSampler(), logits, [Row(SamplingParams(temperature=0.0, logprobs=20))])
    assert logprobs is not None
    assert logprobs[0] is not None
    assert [token for token, _ in logprobs[0].top] == [*range(1, 20, 2), *range(0, 20, 2)]


def test_more_logprobs_than_tokens() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0])
    _, logprobs = sample_with_logprobs(DefaultSampler(), logits, [Row(SamplingParams(logprobs=20))])
    assert logprobs is not None
    assert logprobs[0] is not None
    assert [token for token, _ in logprobs[0].top] == [1, 2, 0]


def test_sampling_reads_nothing_back_to_the_host() -> None:
    # Meta tensors have no values: an .item(), a nonzero or a boolean index raises.
    everything = SamplingParams(
        top_k=5, top_p=0.9, min_p=0.1, presence_penalty=1.0, logit_bias={1: 1.0}, min_tokens=3, logprobs=2
    )
    host, _, _ = prepare([Row(everything, stop_ids=(4,)), Row(), Row(SamplingParams(top_p=0.5))])
    inputs = host.unpack(torch.empty(len(host.pack()), dtype=torch.int32, device="meta"))
    history = inputs.history(torch.empty(3, 64, dtype=torch.int32, device="meta"))
    logits = torch.empty(3, 300, dtype=torch.bfloat16, device="meta")
    tokens, logprobs = DefaultSampler().sample(logits, inputs, history)
    assert tokens.shape == (3,)
    assert logprobs is not None
    assert logprobs.top.shape == (1, 2)


def test_without_triton_the_fused_sampler_names_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl.engine.sampler.has_triton", lambda: False)
    with pytest.raises(ConfigError, match="sampler: 'triton' needs Triton, which is not installed here; use 'default'"):
        FusedSampler()
