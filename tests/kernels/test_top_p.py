"""The search for thresholds against a sort, row by row, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch

from minisgl.engine.sampler import FusedSampler
from minisgl.kernels import top_p
from minisgl.kernels.top_p import Thresholds, find_thresholds
from minisgl.sampling_params import SamplingParams
from tests.kernels.closeness import DEVICE, every_dtype, random, spread
from tests.sampling import Row, prepare, sample

OFF = 2**31 - 1


class Limits(NamedTuple):
    """What one row asks for; it is in the top stage if its top-k or top-p is on."""

    top_k: int = OFF
    top_p: float = 1.0
    min_p: float = 0.0
    temperature: float = 1.0


LIMITS = [
    Limits(),
    Limits(top_k=1),
    Limits(top_k=5),
    Limits(top_k=50, temperature=0.3),
    Limits(top_k=300),
    Limits(top_p=1e-30),
    Limits(top_p=0.4, temperature=2.0),
    Limits(top_p=0.9),
    Limits(temperature=0.0),
    Limits(top_p=0.999, temperature=0.5),
    Limits(top_k=50, top_p=0.9),
    Limits(top_k=3, top_p=0.7, temperature=5.0),
    Limits(top_k=OFF - 1, top_p=0.8),
    Limits(min_p=0.1),
    Limits(min_p=1.0, temperature=0.01),
    Limits(top_k=20, min_p=0.02, temperature=1.5),
    Limits(top_k=40, top_p=0.95, min_p=0.3),
    Limits(top_p=0.5, min_p=0.001),
]


def find(logits: torch.Tensor, limits: list[Limits]) -> Thresholds:
    """The thresholds of rows, of which those with top-k or top-p make up the top stage."""
    rows = [i for i, row in enumerate(limits) if row.top_k < OFF or row.top_p < 1.0]
    of = [limits[i] for i in rows]
    top_k, top_p = (torch.tensor([row[i] for row in of]) for i in (0, 1))
    top = torch.tensor(rows).int().to(DEVICE), top_k.int().to(DEVICE), top_p.float().to(DEVICE)
    min_p, temperature = (torch.tensor([row[i] for row in limits]).to(DEVICE) for i in (2, 3))
    return find_thresholds(logits, temperature, top if rows else None, min_p if min_p.any() else None)


def kept(logits: torch.Tensor, limits: list[Limits]) -> npt.NDArray[np.bool_]:
    """Which tokens may be drawn, bool[S, vocab]."""
    logit, last_tied = (part.unsqueeze(-1) for part in find(logits, limits))
    token = torch.arange(logits.shape[-1], device=logits.device)
    result: npt.NDArray[np.bool_] = ((logits > logit) | ((logits == logit) & (token <= last_tied))).cpu().numpy()
    return result


def sorted_kept(logits: torch.Tensor, limits: list[Limits]) -> npt.NDArray[np.bool_]:
    """The same by the definitions; what is at −inf has no probability and goes."""
    result = np.zeros(logits.shape, dtype=np.bool_)
    for keep, values, row in zip(result, logits.double().cpu().numpy(), limits, strict=True):
        order = np.argsort(-values, kind="stable")[: min(row.top_k, np.isfinite(values).sum())]
        weights = np.exp((values[order] - values.max()) / (row.temperature or 1.0))
        if row.top_p < 1.0:
            before = np.cumsum(weights) - weights
            count = max(int((before < np.float64(np.float32(row.top_p)) * weights.sum()).sum()), 1)
            order, weights = order[:count], weights[:count]
        keep[order[weights >= np.float64(np.float32(row.min_p))]] = True
    return result


def assert_equal(logits: torch.Tensor, limits: list[Limits]) -> None:
    found, expected = kept(logits, limits) & logits.isfinite().cpu().numpy(), sorted_kept(logits, limits)
    wrong = [(row, f.sum(), e.sum()) for row, f, e in zip(limits, found, expected, strict=True) if (f != e).any()]
    assert not wrong


@pytest.fixture(params=[(128, 512), (4, 32)], ids=["as it is", "small chunks"])
def _sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small chunks a short row has many of them, and takes several rounds of a program's loops."""
    monkeypatch.setattr(top_p, "_CHUNK", request.param[0])
    monkeypatch.setattr(top_p, "_ENTRIES", request.param[1])


@every_dtype
@pytest.mark.parametrize("vocab", [1, 300])
@pytest.mark.usefixtures("_sizes")
def test_what_stays_is_what_a_sort_leaves(dtype: torch.dtype, vocab: int) -> None:
    assert_equal(random(len(LIMITS), vocab, dtype=dtype, seed=vocab) * 3, LIMITS)


@pytest.mark.usefixtures("_sizes")
def test_equal_logits_stay_by_their_ids() -> None:
    """Some forty values for 250 tokens, then two, then one."""
    few = (random(len(LIMITS), 250, dtype=torch.float32) * 4).round() / 2
    for logits in (few.bfloat16(), (few > 0).float(), torch.full_like(few, -2.5)):
        assert_equal(logits, LIMITS)


def test_a_zero_has_no_sign() -> None:
    logits = torch.zeros(1, 200, device=DEVICE)
    logits[0, 1::3] = -0.0
    assert np.flatnonzero(kept(logits, [Limits(top_k=9)])).tolist() == list(range(9))


@pytest.mark.usefixtures("_sizes")
def test_tokens_at_minus_infinity_do_not_count() -> None:
    logits = random(len(LIMITS), 250, dtype=torch.float32)
    logits[:, ::3] = float("-inf")
    assert_equal(logits, LIMITS)
    logits[:, :249] = float("-inf")
    assert_equal(logits, LIMITS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_larger_vocabulary(dtype: torch.dtype) -> None:
    limits = [LIMITS[i] for i in (0, 3, 7, 10, 15)]
    assert_equal(random(len(limits), 5000, dtype=dtype, seed=1) * 2, limits)


@pytest.mark.usefixtures("_sizes")
def test_a_rows_threshold_does_not_depend_on_the_batch() -> None:
    logits = random(len(LIMITS), 100, dtype=torch.float32) * 0.1
    together = find(logits, LIMITS)
    for i in (7, 16):
        alone = find(logits[i : i + 1], [LIMITS[i]])
        assert [part.item() for part in alone] == [part[i].item() for part in together]
    apart = find(spread(logits), LIMITS)
    assert all(torch.equal(a, b) for a, b in zip(apart, together, strict=True))


def test_the_share_that_stays_is_within_the_bound_of_rounding() -> None:
    """All weights are about equal, so that many are summed up, and an error moves the end."""
    logits = random(1, 20_000, dtype=torch.float32) * 1e-3
    weights, top_p = logits.double().exp().cpu().numpy(), 0.7
    share = (weights * kept(logits, [Limits(top_p=top_p)])).sum() / weights.sum()
    assert top_p - 1e-5 <= share <= top_p + 1e-5 + 1 / 20_000


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_rows_without_a_distribution_end_and_give_a_token(bad: float) -> None:
    logits = torch.full((4, 130), bad)
    logits[0, 3] = 1.0
    params = [SamplingParams(top_k=3), SamplingParams(top_p=0.5), SamplingParams(min_p=0.5)]
    tokens = sample(FusedSampler(), logits, [Row(p) for p in (*params, SamplingParams(top_k=2, top_p=0.5))])
    assert all(0 <= token < 130 for token in tokens)


def test_no_rows_are_no_work() -> None:
    assert find(torch.empty(0, 50, device=DEVICE), []).logit.tolist() == []


@pytest.mark.gpu
def test_nothing_waits_for_the_device_and_a_graph_holds_it() -> None:
    logits = random(len(LIMITS), 5000, dtype=torch.bfloat16)
    rows = [
        Row(SamplingParams(temperature=row.temperature, top_k=row.top_k % OFF, top_p=row.top_p, min_p=row.min_p))
        for row in LIMITS
    ]
    _, inputs, history = prepare(rows, device=DEVICE)
    sampler = FusedSampler()

    def draw() -> torch.Tensor:
        return sampler.sample(logits, inputs, history).tokens

    expected = without_waiting(draw)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = draw()
    graph.replay()
    assert torch.equal(recorded, expected)


def without_waiting(call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """What ``call`` returns, after a first one that compiles; an error if it waits for the device."""
    call()
    torch.cuda.set_sync_debug_mode("error")
    try:
        return call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
