"""What every communicator must fulfil: the same sums and the same rows on all ranks, whatever the shape."""

from __future__ import annotations

import pytest
import torch

from minisgl.distributed.communicator import COMMUNICATORS
from minisgl.layers.sharding import Communicator
from minisgl.registry import resolve
from tests.distributed.ranks import MakeCommunicator, on_ranks

CONTRACTS = {"make_communicator": (COMMUNICATORS, Communicator)}

SIZES = [1, 2, 3, 4, 8]
SHAPES = [(1, 1), (1, 7), (3, 5), (5, 64), (257, 33)]


@pytest.fixture(scope="module")
def make_communicator(request: pytest.FixtureRequest) -> MakeCommunicator:
    return resolve("--impl", request.param, COMMUNICATORS)


def numbers(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 + rank)).to(dtype)


@pytest.mark.parametrize("size", SIZES)
def test_ranks_know_their_place(make_communicator: MakeCommunicator, size: int) -> None:
    places = on_ranks(size, lambda ranks: (ranks.rank, ranks.size), make_communicator)
    assert places == [(rank, size) for rank in range(size)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", SIZES)
def test_all_reduce_adds_up(make_communicator: MakeCommunicator, size: int, shape: tuple[int, int]) -> None:
    sums = on_ranks(size, lambda ranks: ranks.all_reduce(numbers(ranks.rank, *shape)), make_communicator)
    expected = torch.stack([numbers(rank, *shape).double() for rank in range(size)]).sum(0)
    for each in sums:
        assert each.dtype == torch.float32
        torch.testing.assert_close(each.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_ranks_get_the_same_bits(make_communicator: MakeCommunicator, dtype: torch.dtype) -> None:
    first, *others = on_ranks(
        4, lambda ranks: ranks.all_reduce(numbers(ranks.rank, 31, 17, dtype=dtype)), make_communicator
    )
    for each in others:
        assert torch.equal(each, first)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", SIZES)
def test_all_gather_puts_side_by_side(make_communicator: MakeCommunicator, size: int, shape: tuple[int, int]) -> None:
    gathered = on_ranks(size, lambda ranks: ranks.all_gather(numbers(ranks.rank, *shape)), make_communicator)
    expected = torch.cat([numbers(rank, *shape) for rank in range(size)], dim=1)
    for each in gathered:
        assert torch.equal(each, expected)


def test_integers_are_gathered_too(make_communicator: MakeCommunicator) -> None:
    gathered = on_ranks(3, lambda ranks: ranks.all_gather(torch.tensor([[2**40 + ranks.rank]])), make_communicator)
    assert [each.tolist() for each in gathered] == [[[2**40, 2**40 + 1, 2**40 + 2]]] * 3


def test_strided_input(make_communicator: MakeCommunicator) -> None:
    """Slices of a larger tensor, and a tensor whose rows are not the rows of its memory."""

    def reduce(ranks: Communicator) -> torch.Tensor:
        return ranks.all_reduce(numbers(ranks.rank, 6, 9).t())

    def gather(ranks: Communicator) -> torch.Tensor:
        return ranks.all_gather(numbers(ranks.rank, 6, 9)[:, 2:5])

    whole = [numbers(rank, 6, 9) for rank in range(2)]
    for each in on_ranks(2, reduce, make_communicator):
        torch.testing.assert_close(each, sum(whole, torch.zeros(6, 9)).t())
    for each in on_ranks(2, gather, make_communicator):
        assert torch.equal(each, torch.cat([part[:, 2:5] for part in whole], dim=1))


def test_calls_in_a_row_do_not_mix(make_communicator: MakeCommunicator) -> None:
    def job(ranks: Communicator) -> list[float]:
        totals = []
        for step in range(40):
            x = torch.full((1 + step % 5, 3), float(step * (ranks.rank + 1)))
            totals.append(float(ranks.all_reduce(x.clone())[0, 0]))
            totals.append(float(ranks.all_gather(x)[0].sum()))
        return totals

    expected = [value for step in range(40) for value in (6.0 * step, 18.0 * step)]
    assert on_ranks(3, job, make_communicator) == [expected] * 3
