"""What top-nσ adds to a sampler, and what it leaves alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minisgl.engine.sampler import SAMPLERS, Sampler
from minisgl.registry import resolve
from minisgl.sampling_params import SamplingParams
from tests.sampling import DEVICE, Row, fits, prepare, sample, sample_with_logprobs

CONTRACTS = {"make_sampler": (SAMPLERS, Sampler)}
VOCAB = 50

MakeSampler = Callable[[float], Sampler]


@pytest.fixture
def make_sampler(request: pytest.FixtureRequest) -> MakeSampler:
    return resolve("--impl", request.param, SAMPLERS)


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(5)) * 2


def counts(sampler: Sampler, logits: torch.Tensor, params: SamplingParams, draws: int = 1500) -> torch.Tensor:
    tokens = sample(sampler, logits, [Row(params, seed=seed) for seed in range(draws)])
    return torch.bincount(torch.tensor(tokens), minlength=len(logits))


def expected(logits: torch.Tensor, n: float, temperature: float = 1.0) -> torch.Tensor:
    """The definition in the handout, for one row."""
    finite = logits[logits.isfinite()].double()
    limit = finite.max() - n * finite.std(correction=0)
    return (logits.double() / temperature).softmax(-1).masked_fill(logits.double() < limit, 0.0)


def assert_fits(drawn: torch.Tensor, weights: torch.Tensor, what: str) -> None:
    """Tokens are drawn with these weights, and no others are."""
    wrong = (drawn.gt(0) & weights.eq(0)).nonzero().flatten().tolist()
    assert not wrong, f"tokens {wrong} were drawn, which must not be: {what}"
    assert fits(drawn, weights), f"the right tokens were drawn, but not as often as their weights say: {what}"


class TestWhatStays:
    @pytest.mark.parametrize("n", [0.3, 1.0, 1.7, 3.0])
    def test_tokens_within_n_sigma(self, make_sampler: MakeSampler, logits: torch.Tensor, n: float) -> None:
        assert_fits(counts(make_sampler(n), logits, SamplingParams()), expected(logits, n), f"n is {n}")

    @pytest.mark.parametrize("temperature", [0.5, 20.0])
    def test_the_temperature_does_not_change_which(
        self, make_sampler: MakeSampler, logits: torch.Tensor, temperature: float
    ) -> None:
        drawn = counts(make_sampler(1.0), logits, SamplingParams(temperature=temperature))
        assert_fits(drawn, expected(logits, 1.0, temperature), f"n is 1, the temperature {temperature}")

    def test_the_likeliest_always_stays(self, make_sampler: MakeSampler, logits: torch.Tensor) -> None:
        drawn = counts(make_sampler(0.0), logits, SamplingParams(temperature=50.0)).nonzero().flatten().tolist()
        assert drawn == [int(logits.argmax())], (
            f"with n = 0 the likeliest alone stays, {logits.argmax()}; drawn: {drawn}"
        )

    @pytest.mark.parametrize("n", [0.0, 1.0, float("inf")])
    def test_equal_logits_all_stay(self, make_sampler: MakeSampler, n: float) -> None:
        assert_fits(counts(make_sampler(n), torch.zeros(10), SamplingParams()), torch.ones(10), "logits are equal")

    def test_what_cannot_be_drawn_does_not_count(self, make_sampler: MakeSampler, logits: torch.Tensor) -> None:
        logits[::2] = float("-inf")
        assert_fits(counts(make_sampler(1.0), logits, SamplingParams()), expected(logits, 1.0), "every other is -inf")

    def test_rows_are_judged_one_by_one(self, make_sampler: MakeSampler) -> None:
        flat = torch.linspace(0.0, 1e-3, VOCAB)
        steep = torch.linspace(0.0, 30.0, VOCAB)
        rows = [Row(SamplingParams(temperature=100.0), seed=seed) for seed in range(1000)]
        drawn = torch.tensor(sample(make_sampler(1.0), torch.stack([flat, steep]).repeat(500, 1), rows))
        for row, own in enumerate((flat, steep)):
            mine, wanted = drawn[row::2].unique().tolist(), expected(own, 1.0, 100.0).nonzero().flatten().tolist()
            assert mine == wanted, f"row {row} of two kinds draws {mine}; from its own logits alone it is {wanted}"

    def test_narrow_logits_are_computed_with_in_float32(self, make_sampler: MakeSampler) -> None:
        wide = torch.arange(VOCAB).float() / 4 + 1000
        logits = wide.bfloat16()
        drawn = counts(make_sampler(1.0), logits, SamplingParams())
        assert_fits(drawn, expected(logits.float(), 1.0), "bfloat16 logits are to be computed with in float32")


class TestOtherStages:
    def test_greedy_rows_are_left_alone(self, make_sampler: MakeSampler, logits: torch.Tensor) -> None:
        batch = logits.repeat(3, 1)
        batch[1] = -batch[1]
        rows = [Row(), Row(), Row(SamplingParams(), seed=3)]
        tokens, wanted = sample(make_sampler(1.0), batch, rows)[:2], [int(logits.argmax()), int(logits.argmin())]
        assert tokens == wanted, f"two greedy rows beside a drawn one have {tokens}, and their likeliest are {wanted}"

    def test_biases_come_before(self, make_sampler: MakeSampler, logits: torch.Tensor) -> None:
        biased = logits.clone()
        biased[[4, 9]] += torch.tensor([20.0, 19.0])
        drawn = counts(make_sampler(1.0), logits, SamplingParams(logit_bias={4: 20.0, 9: 19.0}))
        assert_fits(drawn, expected(biased, 1.0), "biases are added before σ is taken")

    def test_masked_tokens_do_not_count(self, make_sampler: MakeSampler, logits: torch.Tensor) -> None:
        best = int(logits.argmax())
        masked = logits.clone()
        masked[best] = float("-inf")
        params = SamplingParams(min_tokens=5)
        tokens = sample(make_sampler(1.0), logits, [Row(params, stop_ids=(best,), seed=seed) for seed in range(1500)])
        drawn = torch.bincount(torch.tensor(tokens), minlength=VOCAB)
        assert_fits(drawn, expected(masked, 1.0), "the likeliest token is masked, so it is not the maximum")

    def test_top_p_is_a_share_of_what_is_left(self, make_sampler: MakeSampler) -> None:
        logits = torch.tensor([0.3, 0.3, 0.2, 0.1, 0.1]).log()
        # Within one σ are 0.3, 0.3 and 0.2, of which the first two are 0.75: enough for 0.7.
        assert expected(logits, 1.0).count_nonzero() == 3, "the test's own example is wrong"
        drawn = counts(make_sampler(1.0), logits, SamplingParams(top_p=0.7))
        assert_fits(drawn, torch.tensor([1, 1, 0, 0, 0]), "top-p 0.7 is a share of what top-nσ leaves")

    def test_logprobs_are_of_the_models_own_distribution(self, make_sampler: MakeSampler, logits: torch.Tensor) -> None:
        tokens, logprobs = sample_with_logprobs(make_sampler(0.5), logits, [Row(SamplingParams(logprobs=3))])
        assert logprobs is not None, "log-probabilities were asked for, and there are none"
        assert logprobs[0] is not None, "the row asked for log-probabilities, and has none"
        wanted = logits.log_softmax(-1)[tokens[0]].item()
        assert logprobs[0].logprob == pytest.approx(wanted, abs=1e-5), (
            f"the log-probability is {logprobs[0].logprob}, and in the model's own distribution it is {wanted}"
        )

    def test_the_logits_are_not_changed(self, make_sampler: MakeSampler, logits: torch.Tensor) -> None:
        batch = logits.repeat(2, 1)
        sample(make_sampler(1.0), batch, [Row(SamplingParams()), Row()])
        assert torch.equal(batch, logits.repeat(2, 1)), "the sampler has changed the logits, which are not its own"


class Operations(TorchDispatchMode):
    """Counts what PyTorch is told to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operations(sampler: Sampler, rows: int) -> Counter[str]:
    params = SamplingParams(temperature=0.8)
    _, inputs, history = prepare([Row(params, seed=seed) for seed in range(rows)], device=DEVICE)
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    with Operations() as seen:
        sampler.sample(logits, inputs, history)
    return seen.counts


class TestOperations:
    def test_as_many_for_a_batch_as_for_a_row(self, make_sampler: MakeSampler) -> None:
        one, many = (operations(make_sampler(1.0), rows).total() for rows in (1, 64))
        assert many == one, f"{many} operations for 64 rows, {one} for one: the rows are computed one by one"

    def test_nothing_is_read_back(self, make_sampler: MakeSampler) -> None:
        counts = operations(make_sampler(1.0), 4)
        waits = [name for name in counts if any(each in name for each in ("_local_scalar_dense", "nonzero", "_to_cpu"))]
        assert not waits, f"{waits} wait for the device: a tensor's value decides what Python does next"
