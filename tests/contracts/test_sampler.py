"""What every sampler must do, whatever its method: run over the registered ones, or over ``--impl module:Class``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from minisgl.engine.sampler import SAMPLERS, Sampler
from minisgl.registry import resolve
from minisgl.sampling_params import SamplingParams
from tests.sampling import DEVICE, Row, fits, prepare, sample, sample_with_logprobs

VOCAB = 50
CONTRACTS = {"sampler": (SAMPLERS, Sampler)}


@pytest.fixture
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return resolve("--impl", request.param, SAMPLERS)()


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(5)) * 2


def random(temperature: float = 1.0, **params: Any) -> SamplingParams:
    return SamplingParams(temperature=temperature, **params)


def counts(sampler: Sampler, logits: torch.Tensor, params: SamplingParams, draws: int = 4000) -> torch.Tensor:
    tokens = sample(sampler, logits, [Row(params, seed=seed) for seed in range(draws)])
    return torch.bincount(torch.tensor(tokens), minlength=len(logits))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_greedy_rows_take_the_likeliest_token(sampler: Sampler, dtype: torch.dtype) -> None:
    logits = torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert sample(sampler, logits, [Row()] * 5) == logits.argmax(-1).tolist()


def test_tokens_are_int32(sampler: Sampler, logits: torch.Tensor) -> None:
    for params in (SamplingParams(temperature=0.0), random()):
        _, inputs, history = prepare([Row(params)] * 3, device=DEVICE)
        tokens = sampler.sample(logits.to(DEVICE).expand(3, -1), inputs, history).tokens
        assert tokens.dtype == torch.int32
        assert tokens.shape == (3,)


def test_among_equal_logits_greedy_takes_the_lowest_id(sampler: Sampler) -> None:
    logits = torch.zeros(VOCAB)
    assert sample(sampler, logits, [Row(), Row(random(top_k=1)), Row(random(top_p=1e-9))]) == [0, 0, 0]
    logits[[7, 9]] = 1.0
    assert sample(sampler, logits, [Row(), Row(random(top_k=1)), Row(random(top_p=1e-9))]) == [7, 7, 7]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_random_rows_follow_the_softmax(sampler: Sampler, logits: torch.Tensor, temperature: float) -> None:
    drawn = counts(sampler, logits, random(temperature=temperature))
    assert fits(drawn, (logits / temperature).softmax(-1))
    assert not fits(drawn, (logits / (temperature * 1.5)).softmax(-1))


@pytest.mark.parametrize("k", [1, 2, 10, VOCAB, 10 * VOCAB, 2**31 - 1])
def test_top_k(sampler: Sampler, logits: torch.Tensor, k: int) -> None:
    probabilities = logits.softmax(-1)
    probabilities[logits.argsort(descending=True)[k:]] = 0
    assert fits(counts(sampler, logits, random(top_k=k)), probabilities)


def test_top_k_of_equal_logits_keeps_the_lowest_ids(sampler: Sampler) -> None:
    expected = torch.zeros(VOCAB)
    expected[:7] = 1
    assert fits(counts(sampler, torch.zeros(VOCAB), random(top_k=7)), expected)


@pytest.mark.parametrize("p", [1e-300, 0.2, 0.7, 0.95, 1.0])
def test_top_p(sampler: Sampler, logits: torch.Tensor, p: float) -> None:
    probabilities = logits.softmax(-1)
    order = logits.argsort(descending=True)
    before = probabilities[order].cumsum(-1) - probabilities[order]
    probabilities[order[1:][before[1:] >= p]] = 0
    assert fits(counts(sampler, logits, random(top_p=p)), probabilities)


@pytest.mark.parametrize("p", [0.01, 0.3, 1.0])
def test_min_p(sampler: Sampler, logits: torch.Tensor, p: float) -> None:
    probabilities = logits.softmax(-1)
    probabilities[probabilities < p * probabilities.max()] = 0
    assert fits(counts(sampler, logits, random(min_p=p)), probabilities)


def test_top_p_is_a_share_of_what_top_k_left(sampler: Sampler) -> None:
    logits = torch.tensor([0.3, 0.3, 0.2, 0.1, 0.1]).log()
    # Of 0.3, 0.3, 0.2 the first two are 0.75: enough for 0.7. Of the whole they are 0.6, and a third would stay.
    assert fits(counts(sampler, logits, random(top_k=3, top_p=0.7)), torch.tensor([1, 1, 0, 0, 0]))


def test_a_low_temperature_is_raised_and_not_an_overflow(sampler: Sampler) -> None:
    logits = torch.tensor([0.0, 0.01, 0.02])
    drawn = counts(sampler, logits, random(temperature=1e-6))
    assert fits(drawn, (logits / 0.01).softmax(-1))


def test_tokens_at_minus_infinity_are_never_drawn(sampler: Sampler, logits: torch.Tensor) -> None:
    logits[::2] = float("-inf")
    for params in (random(temperature=100.0), random(top_k=40), random(top_p=0.999), random(min_p=0.0001)):
        assert fits(counts(sampler, logits, params), (logits / params.temperature).softmax(-1))


def test_a_seed_decides_whatever_else_is_in_the_batch(sampler: Sampler) -> None:
    generator = torch.Generator().manual_seed(1)
    kinds = [
        random(temperature=0.8),
        random(top_k=9),
        random(top_p=0.8),
        random(min_p=0.05, repetition_penalty=1.3),
        random(logit_bias={3: 5.0}, logprobs=2),
        SamplingParams(temperature=0.0),
    ]
    rows = [
        Row(kinds[i % len(kinds)], prompt=(1, 2), output=(3, 4), stop_ids=(5,), seed=1000 + i, index=i % 7 + 2)
        for i in range(64)
    ]
    logits = torch.randn(64, VOCAB, generator=generator)
    together = sample(sampler, logits, rows)
    alone = [sample(sampler, logits[i : i + 1], [rows[i]], slots=[i % 3])[0] for i in range(64)]
    assert together == alone
    order = torch.randperm(64, generator=generator).tolist()
    shuffled = sample(sampler, logits[order], [rows[i] for i in order], slots=order)
    assert shuffled == [together[i] for i in order]


def test_seeds_and_positions_draw_differently(sampler: Sampler) -> None:
    logits = torch.zeros(1000)
    by_seed = sample(sampler, logits, [Row(random(), seed=seed) for seed in range(100)])
    by_position = sample(sampler, logits, [Row(random(), index=index) for index in range(100)])
    assert len(set(by_seed)) > 80
    assert len(set(by_position)) > 80
    assert by_seed != by_position


def test_the_logits_are_not_changed(sampler: Sampler, logits: torch.Tensor) -> None:
    params = random(top_k=5, top_p=0.9, min_p=0.1, presence_penalty=1.0, logit_bias={1: 1.0}, min_tokens=3, logprobs=1)
    batch = logits.repeat(3, 1)
    sample(sampler, batch, [Row(params, stop_ids=(2,)), Row(), Row(allowed=(1, 2))])
    assert torch.equal(batch, logits.repeat(3, 1))


def test_narrow_logits_are_computed_with_in_float32(sampler: Sampler) -> None:
    logits = torch.full((4,), 100.0, dtype=torch.bfloat16)  # the next larger bfloat16 is 100.5
    greedy, drawn = SamplingParams(temperature=0.0, logit_bias={2: 0.1}), random(0.01, logit_bias={2: 0.1})
    assert sample(sampler, logits, [Row(greedy), Row(drawn)]) == [2, 2]


def test_logit_bias(sampler: Sampler) -> None:
    logits = torch.zeros(VOCAB)
    greedy = SamplingParams(temperature=0.0, logit_bias={4: 1.0, 6: 2.0, 0: -100.0})
    assert sample(sampler, logits, [Row(), Row(greedy), Row()]) == [0, 6, 0]
    drawn = counts(sampler, logits, random(logit_bias={4: 1.0, 6: 2.0, 0: -100.0}))
    biased = logits.clone()
    biased[[4, 6, 0]] = torch.tensor([1.0, 2.0, -100.0])
    assert fits(drawn, biased.softmax(-1))


def test_stop_tokens_wait_for_min_tokens(sampler: Sampler) -> None:
    logits = torch.tensor([0.0, 9.0, 8.0, 1.0])
    params = SamplingParams(temperature=0.0, min_tokens=2)
    rows = [Row(params, stop_ids=(1, 2), index=index) for index in (0, 1, 2, 3)]
    assert sample(sampler, logits, [*rows, Row(stop_ids=(1, 2))]) == [3, 3, 1, 1, 1]
    drawn = counts(sampler, logits, random(min_tokens=2))
    assert drawn[1] > 0, "no stop tokens, nothing to mask"


def test_a_bias_does_not_lift_the_mask(sampler: Sampler) -> None:
    params = SamplingParams(temperature=0.0, min_tokens=1, logit_bias={1: 100.0})
    assert sample(sampler, torch.zeros(4), [Row(params, stop_ids=(1,))]) == [0]


@pytest.mark.parametrize("vocab", [31, 32, 33, 50, 64, 1000])
def test_a_constrained_row_takes_the_likeliest_token_that_it_may(sampler: Sampler, vocab: int) -> None:
    """Each token alone, so that each bit of a mask counts, the sign bit of a word as well."""
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(6))
    rows = [Row(allowed=(token,)) for token in range(vocab)]
    assert sample(sampler, logits, rows) == list(range(vocab))
    halves = [tuple(range(0, vocab, 2)), tuple(range(1, vocab, 2)), tuple(range(vocab))]
    expected = [max(half, key=logits.tolist().__getitem__) for half in halves]
    assert sample(sampler, logits, [Row(allowed=half) for half in halves]) == expected


@pytest.mark.parametrize("params", [random(), random(top_k=3), random(top_p=0.6), random(min_p=0.3), random(0.2)])
def test_a_constrained_row_draws_among_the_tokens_that_it_may(sampler: Sampler, params: SamplingParams) -> None:
    """What is masked counts neither for top-k nor for top-p nor for min-p: as if there were no other tokens."""
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(7)) * 2
    allowed = tuple(logits.argsort(descending=True)[10:30].tolist())
    kept = logits.clone()
    kept[[token for token in range(VOCAB) if token not in allowed]] = float("-inf")
    seeds = range(2000)
    constrained = sample(sampler, logits, [Row(params, seed=seed, allowed=allowed) for seed in seeds])
    assert constrained == sample(sampler, kept, [Row(params, seed=seed) for seed in seeds])
    assert set(constrained) <= set(allowed)
    assert len(set(constrained)) > 1


def test_neither_bias_nor_penalty_lifts_a_constraint(sampler: Sampler) -> None:
    params = SamplingParams(temperature=0.0, logit_bias={1: 100.0, 3: 1.0}, repetition_penalty=0.1)
    assert sample(sampler, torch.ones(6), [Row(params, output=(0, 0), allowed=(2, 3, 4))]) == [3]


def test_a_constraint_and_min_tokens_both_count(sampler: Sampler) -> None:
    params = SamplingParams(temperature=0.0, min_tokens=2)
    logits = torch.tensor([0.0, 9.0, 8.0, 1.0])
    rows = [Row(params, stop_ids=(1,), index=index, allowed=(1, 3)) for index in (1, 2)]
    assert sample(sampler, logits, rows) == [3, 1]


def test_a_constraint_is_of_its_row_alone(sampler: Sampler) -> None:
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(30, VOCAB, generator=generator)
    kinds = [SamplingParams(temperature=0.0), random(), random(top_k=5), random(min_p=0.1, presence_penalty=0.5)]
    rows = [Row(kinds[i % 4], output=(3, 4), seed=i) for i in range(30)]
    constrained = [replace(row, allowed=(i, i + 1)) if i % 3 == 0 else row for i, row in enumerate(rows)]
    free, mixed = sample(sampler, logits, rows), sample(sampler, logits, constrained)
    for i in range(30):
        if i % 3 == 0:
            assert mixed[i] in (i, i + 1)
            assert mixed[i] == sample(sampler, logits[i : i + 1], [constrained[i]])[0]
        else:
            assert mixed[i] == free[i]


def test_logprobs_of_a_constrained_row_are_the_models_own(sampler: Sampler, logits: torch.Tensor) -> None:
    least = int(logits.argmin())
    params = SamplingParams(temperature=0.0, logprobs=1)
    tokens, logprobs = sample_with_logprobs(sampler, logits, [Row(params, allowed=(least,))])
    assert tokens == [least]
    assert logprobs is not None
    assert logprobs[0] is not None
    assert logprobs[0].logprob == pytest.approx(logits.log_softmax(-1)[least].item(), abs=1e-5)
    assert logprobs[0].top[0][0] == int(logits.argmax())


def test_a_row_that_may_sample_nothing_spares_the_others(sampler: Sampler, logits: torch.Tensor) -> None:
    """Its token means nothing, but it is one of the vocabulary."""
    for params in (SamplingParams(temperature=0.0), random(), random(top_k=3, top_p=0.5, min_p=0.1)):
        alone = sample(sampler, logits, [Row(params, seed=1)])
        tokens = sample(sampler, logits, [Row(params, seed=1), Row(params, allowed=())])
        assert tokens[:1] == alone
        assert 0 <= tokens[1] < VOCAB


def test_penalties_against_a_loop_over_tokens(sampler: Sampler) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, VOCAB, generator=generator)
    logits[:, :8] += 2
    rows, expected = [], []
    for i in range(40):
        prompt = tuple(torch.randint(0, 8, (1 + i % 5,), generator=generator).tolist())
        output = tuple(torch.randint(0, 8, (i % 9,), generator=generator).tolist())
        presence, frequency, repetition = (i % 3 - 1) * 0.9, (i % 4 - 1) * 0.7, (0.5, 1.0, 1.8)[i % 3 - 1]
        params = SamplingParams(
            temperature=0.0,
            presence_penalty=presence,
            frequency_penalty=frequency,
            repetition_penalty=repetition,
        )
        rows.append(Row(params, prompt, output))
        values = logits[i].tolist()
        for token in set(prompt + output):
            values[token] = values[token] / repetition if values[token] > 0 else values[token] * repetition
        for token in output:
            values[token] -= frequency
        for token in set(output):
            values[token] -= presence
        expected.append(max(range(VOCAB), key=values.__getitem__))
    assert sample(sampler, logits, rows) == expected
    assert expected != logits.argmax(-1).tolist()


def test_logprobs_are_of_the_models_own_distribution(sampler: Sampler, logits: torch.Tensor) -> None:
    plain = logits.log_softmax(-1)
    likeliest = logits.argsort(descending=True).tolist()
    params = random(temperature=0.5, top_k=3, logit_bias={likeliest[5]: 50.0}, logprobs=4)
    rows = [Row(), Row(params), Row(SamplingParams(temperature=0.0, logprobs=0)), Row(random(logprobs=20))]
    tokens, logprobs = sample_with_logprobs(sampler, logits, rows)
    assert logprobs is not None
    assert logprobs[0] is None
    for row, count in ((1, 4), (2, 0), (3, 20)):
        entry = logprobs[row]
        assert entry is not None
        assert entry.token_id == tokens[row]
        assert entry.logprob == pytest.approx(plain[tokens[row]].item(), abs=1e-5)
        assert [token for token, _ in entry.top] == likeliest[:count]
        assert [value for _, value in entry.top] == pytest.approx(plain[likeliest[:count]].tolist(), abs=1e-5)
    assert tokens[1] == likeliest[5]
    assert sample_with_logprobs(sampler, logits, [Row(), Row(random())])[1] is None
