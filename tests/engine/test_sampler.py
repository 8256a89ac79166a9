"""The default sampler's stages against transformers' logits processors, naive loops and exact distributions."""

from __future__ import annotations

from typing import Any

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

from minisgl.core import SamplingParams
from minisgl.engine.logits_processors import count_tokens, keep_min_p, keep_top, penalise, softmax_weights
from minisgl.engine.random import draw
from minisgl.engine.sampler import SAMPLERS, DefaultSampler
from minisgl.engine.sampling_stages import TokenHistory
from tests.sampling import Row, fits, prepare, sample, sample_with_logprobs

BELOW_ONE = 1 - 2.0**-53


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
    assert isinstance(SAMPLERS.get("default")(), DefaultSampler)


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


@settings(max_examples=60, deadline=None)
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


@settings(max_examples=200, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 0.0, 1e-30, 1e-7, 0.1, 1.0]), min_size=1, max_size=300).filter(any),
    uniform=st.one_of(st.sampled_from([0.0, BELOW_ONE]), st.floats(0.0, BELOW_ONE)),
)
def test_a_token_of_weight_zero_is_never_drawn(weights: list[float], uniform: float) -> None:
    token = draw(torch.tensor([weights]), torch.tensor([uniform], dtype=torch.float64))
    assert weights[int(token)] > 0


@settings(max_examples=100, deadline=None)
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


def test_uniform_numbers_map_to_tokens_by_the_cumulative_sum() -> None:
    weights = torch.tensor([[1.0, 0.0, 2.0, 1.0]]).repeat(6, 1)
    uniform = torch.tensor([0.0, 0.24, 0.25, 0.74, 0.75, BELOW_ONE], dtype=torch.float64)
    assert draw(weights, uniform).tolist() == [0, 0, 2, 2, 3, 3]


def test_blocks_of_the_vocabulary_are_searched_like_one_line() -> None:
    weights = torch.zeros(5, 1000)
    weights[:, [200, 400, 600, 999]] = 1.0
    uniform = torch.tensor([0.0, 0.25, 0.5, 0.75, BELOW_ONE], dtype=torch.float64)
    assert draw(weights, uniform).tolist() == [200, 400, 600, 999, 999]


def test_a_block_sum_that_was_rounded_up_does_not_lead_past_the_block() -> None:
    weights = torch.zeros(1, 256)
    weights[0, 3], weights[0, 5] = 1.0, 1.5 * 2.0**-24  # 1 + 2**-23 in float32
    assert draw(weights, torch.tensor([BELOW_ONE], dtype=torch.float64)).tolist() == [5]


def test_rare_tokens_of_a_large_vocabulary_keep_their_shares() -> None:
    # One token has all but 1.5e-4 of the mass. A float32 running sum starts at 1 and never sees a weight of 1e-9.
    vocab = 150_000
    weights = torch.full((vocab,), 1e-9)
    weights[0] = 1.0
    points = 1000
    tail = torch.linspace(0.01, 0.99, points, dtype=torch.float64) * 1e-9 * vocab
    tokens = draw(weights.expand(points, -1), (1.0 + tail) / (1.0 + 1e-9 * vocab))
    expected = tail / 1e-9
    # The float32 sum of the first block may be off by 6e-8, the share of 60 tail tokens.
    assert (tokens - expected).abs().max() < 70
    assert len(set(tokens.tolist())) == points


def test_draws_from_a_large_vocabulary_fit_its_distribution() -> None:
    vocab, draws = 150_001, 5_000
    weights = 1.0 / torch.arange(1, vocab + 1)
    weights = weights[torch.randperm(vocab, generator=torch.Generator().manual_seed(1))]
    uniform = torch.rand(draws, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    tokens = torch.cat([draw(weights.expand(len(part), -1), part) for part in uniform.tensor_split(10)])
    counts = torch.bincount(tokens, minlength=vocab)
    assert fits(counts, weights)
    group = torch.arange(vocab) // 500  # and again with every group of neighbours frequent enough to be judged
    shape = int(group.max()) + 1
    assert fits(
        torch.zeros(shape, dtype=torch.long).scatter_add(0, group, counts),
        torch.zeros(shape).scatter_add(0, group, weights),
    )


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
