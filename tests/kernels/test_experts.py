"""Experts as grouped products, against float64 of the plain layer; and how pairs are cut into tiles."""

from __future__ import annotations

import pytest
import torch

from minisgl.kernels.experts import ExpertTiles, GemmBlocks, MoEPlan, choose_moe_plan, fused_experts, sort_by_expert
from minisgl.kernels.launch import INTERPRETED
from minisgl.layers.fused import FusedExperts
from minisgl.layers.mlp import Experts
from tests.kernels.closeness import DEVICE, TOLERANCE, every_dtype, random, spread

NUM_EXPERTS, TOP_K = 6, 2
SMALL = MoEPlan(16, GemmBlocks(16, 16, 4, 2), GemmBlocks(16, 16, 4, 2))


def routing(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, device=DEVICE)


def random_routing(tokens: int, num_experts: int = NUM_EXPERTS, top_k: int = TOP_K) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.rand(tokens, num_experts, generator=generator).topk(top_k).indices.to(DEVICE)


def experts_layer(num_experts: int, hidden: int, intermediate: int, dtype: torch.dtype) -> Experts:
    layer = Experts(num_experts, hidden, intermediate)
    # Sums of about the size of their summands, so that errors are those of one rounding and not of a sum of many.
    layer.gate_up_proj.data = random(num_experts, 2 * intermediate, hidden, dtype=dtype, seed=1) / hidden**0.5
    layer.down_proj.data = random(num_experts, hidden, intermediate, dtype=dtype, seed=2) / intermediate**0.5
    return layer


def error(
    experts: torch.Tensor,
    hidden: int,
    intermediate: int,
    dtype: torch.dtype,
    plan: MoEPlan | None = None,
    apart: int = 0,
) -> float:
    """‖fused − float64‖ / ‖float64‖ of the layer; NaN if anything was not written."""
    num_experts = max(NUM_EXPERTS, int(experts.max()) + 1)
    layer = experts_layer(num_experts, hidden, intermediate, dtype)
    x = random(len(experts), hidden, dtype=dtype)
    weights = random(*experts.shape, dtype=dtype, seed=3).abs()
    x_read = spread(x) if apart else x
    out = fused_experts(x_read, layer.gate_up_proj, layer.down_proj, experts, weights, plan)
    assert out.dtype == dtype
    reference = layer.double()(x.double(), experts, weights.double())
    return float((out.double() - reference).norm() / reference.norm())


@every_dtype
@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_equals_float64(dtype: torch.dtype, tokens: int) -> None:
    """Two products and a sum round three times."""
    assert error(random_routing(tokens), 32, 16, dtype) <= 3 * TOLERANCE[dtype]


@every_dtype
@pytest.mark.parametrize(("hidden", "intermediate"), [(40, 24), (17, 33), (1, 1), (130, 70)])
def test_sizes_that_no_tile_fits(dtype: torch.dtype, hidden: int, intermediate: int) -> None:
    assert error(random_routing(9), hidden, intermediate, dtype, SMALL) <= 3 * TOLERANCE[dtype]
    assert error(random_routing(9), hidden, intermediate, dtype) <= 3 * TOLERANCE[dtype]


@pytest.mark.parametrize(
    "experts",
    [
        routing([4, 4], [4, 4], [1, 1]),
        routing([5, 5]),
        routing(*([3, 3],) * 40),
        routing(*([0, 5],) * 33),
        routing(*([i % 6, 5 - i % 6] for i in range(50))),
        routing([0], [5], [2], [2]),
        random_routing(20, 6, 5),
        random_routing(30, 37, 3),
    ],
    ids=["one expert twice", "last", "all one", "two, far apart", "even", "k = 1", "k = 5", "37 experts"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_of_routing(experts: torch.Tensor, dtype: torch.dtype) -> None:
    assert error(experts, 32, 16, dtype) <= 3 * TOLERANCE[dtype]


@pytest.mark.parametrize("tokens", [1, 60, 200, 400])
def test_each_plan_at_the_size_that_it_is_for(tokens: int) -> None:
    experts = random_routing(tokens, 8)
    assert error(experts, 64, 48, torch.bfloat16) <= 3 * TOLERANCE[torch.bfloat16]


def test_plans_grow_with_the_pairs_of_an_expert() -> None:
    plans = [choose_moe_plan(torch.bfloat16, 8 * tokens, 128) for tokens in (1, 256, 8192)]
    assert plans[0].block_m <= plans[1].block_m < plans[2].block_m
    assert len({choose_moe_plan(torch.float32, 8 * tokens, 128) for tokens in (1, 256, 8192)}) == 1


def test_rows_of_the_input_may_lie_apart() -> None:
    assert error(random_routing(7), 32, 16, torch.float32, apart=1) <= 3 * TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_gets_the_same_bits_wherever_it_stands(dtype: torch.dtype) -> None:
    layer = experts_layer(NUM_EXPERTS, 32, 16, dtype)
    x, weights = random(50, 32, dtype=dtype), random(50, TOP_K, dtype=dtype, seed=3)
    experts = random_routing(50)
    out = fused_experts(x, layer.gate_up_proj, layer.down_proj, experts, weights)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(7)).to(DEVICE)
    moved = fused_experts(x[order], layer.gate_up_proj, layer.down_proj, experts[order], weights[order])
    if INTERPRETED:  # NumPy's products may round by the place of a row in a tile
        torch.testing.assert_close(moved, out[order], rtol=0, atol=TOLERANCE[dtype] * float(out.abs().max()))
    else:
        assert torch.equal(moved, out[order])


def rows_of(tiles: ExpertTiles) -> list[tuple[int, list[int]]]:
    """Expert and pairs of each tile that is not empty."""
    pairs = tiles.pairs.tolist()
    places = zip(tiles.experts.tolist(), tiles.begins.tolist(), tiles.ends.tolist(), strict=True)
    return [(expert, pairs[begin : min(begin + tiles.block_m, end)]) for expert, begin, end in places if begin < end]


@pytest.mark.parametrize("block_m", [16, 32])
@pytest.mark.parametrize(
    "experts",
    [random_routing(1), random_routing(100), random_routing(3000), routing(*([2, 2],) * 40), random_routing(60, 37, 9)],
    ids=["1", "100", "3000", "one expert", "37 experts"],
)
def test_each_pair_is_in_one_tile_of_its_expert(experts: torch.Tensor, block_m: int) -> None:
    num_experts = max(NUM_EXPERTS, int(experts.max()) + 1)
    tiles = sort_by_expert(experts, num_experts, block_m)
    expert_of_pair = experts.flatten().tolist()
    found = rows_of(tiles)
    assert all(expert_of_pair[pair] == expert for expert, pairs in found for pair in pairs)
    by_expert = [[pair for tile, pairs in found if tile == expert for pair in pairs] for expert in range(num_experts)]
    # In order, and so the same at each call.
    assert by_expert == [[p for p, e in enumerate(expert_of_pair) if e == expert] for expert in range(num_experts)]
    assert len(tiles.experts) == min(experts.numel(), num_experts + experts.numel() // block_m)


def test_the_layer_shares_the_parameters_and_can_be_captured() -> None:
    plain = experts_layer(NUM_EXPERTS, 32, 16, torch.float32)
    fused = FusedExperts(plain)
    assert fused.gate_up_proj is plain.gate_up_proj
    assert fused.down_proj is plain.down_proj
    assert (plain.capturable, fused.capturable) == (False, True)
    x, experts = random(12, 32, dtype=torch.float32), random_routing(12)
    weights = random(12, TOP_K, dtype=torch.float32, seed=3)
    torch.testing.assert_close(fused(x, experts, weights), plain(x, experts, weights), rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_a_graph_serves_every_routing() -> None:
    """Recorded for one routing, replayed for others, with nothing read by the host."""
    layer = FusedExperts(experts_layer(NUM_EXPERTS, 32, 16, torch.float32))
    x, experts = random(40, 32, dtype=torch.float32), random_routing(40)
    weights = random(40, TOP_K, dtype=torch.float32, seed=3)
    layer(x, experts, weights)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x, experts, weights)
    for routed in (random_routing(40), routing(*([3, 3],) * 40), routing(*([0, 5],) * 40)):
        experts.copy_(routed)
        graph.replay()
        assert torch.equal(out, layer(x, experts, weights))
