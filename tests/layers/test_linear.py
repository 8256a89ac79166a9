"""Linear layers, the MLPs and the embedding compute what their formulas say, and declare their weights."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from minisgl.layers.embedding import Embedding
from minisgl.layers.linear import Linear, MergedColumnParallelLinear, RowParallelLinear, linear, prepack_weight
from minisgl.layers.mlp import Experts, GatedMLP, MoE, silu_and_mul
from minisgl.layers.sharding import Communicator, divide, empty_parameter
from tests.distributed.ranks import Position, on_ranks


@pytest.mark.parametrize("tokens", [0, 1, 7, 64])
@pytest.mark.parametrize("bias", [False, True])
def test_a_prepacked_weight_gives_the_same_product(tokens: int, bias: bool) -> None:
    plain = empty_parameter(37, 50)
    plain.normal_()
    b = torch.randn(37) if bias else None
    x = torch.randn(tokens, 60)[:, :50]  # rows that do not lie next to each other
    torch.testing.assert_close(linear(x, prepack_weight(plain), b), F.linear(x, plain, b))


def test_a_prepacked_weight_turns_back_into_what_it_was() -> None:
    plain = empty_parameter(37, 50)
    plain.normal_()
    layout = prepack_weight(plain)
    assert layout.is_mkldnn
    assert layout.shape == plain.shape
    assert torch.equal(layout.to_dense(), plain)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_stay_as_they_are(dtype: torch.dtype) -> None:
    plain = torch.nn.Parameter(torch.randn(4, 6, dtype=dtype), requires_grad=False)
    assert prepack_weight(plain) is plain
    x = torch.randn(3, 6, dtype=dtype)
    torch.testing.assert_close(linear(x, plain, None), F.linear(x, plain))


def test_without_onednn_the_weight_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    plain = empty_parameter(4, 6)
    assert prepack_weight(plain) is plain


def randomize(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        parameter.normal_()


def test_packed_linear_is_its_parts_side_by_side() -> None:
    packed = MergedColumnParallelLinear(6, {"q_proj": 4, "k_proj": 2, "v_proj": 3}, bias=True)
    randomize(packed)
    x = torch.randn(5, 6)
    outputs = packed(x).split([4, 2, 3], dim=1)
    parts = {part.source: getattr(packed, part.parameter)[part.index] for part in packed.weight_parts()}
    assert list(parts) == [f"{name}_proj.{parameter}" for name in "qkv" for parameter in ("weight", "bias")]
    for name, output in zip("qkv", outputs, strict=True):
        expected = F.linear(x, parts[f"{name}_proj.weight"], parts[f"{name}_proj.bias"])
        torch.testing.assert_close(output, expected)


def test_packed_linear_without_bias_declares_none() -> None:
    packed = MergedColumnParallelLinear(6, {"gate_proj": 4, "up_proj": 4})
    assert [part.source for part in packed.weight_parts()] == ["gate_proj.weight", "up_proj.weight"]


def test_silu_and_mul_takes_the_gate_first_and_leaves_its_input_alone() -> None:
    gate_up = torch.randn(3, 10)
    before = gate_up.clone()
    torch.testing.assert_close(silu_and_mul(gate_up), F.silu(before[:, :5]) * before[:, 5:])
    torch.testing.assert_close(gate_up, before)


def test_gated_mlp() -> None:
    mlp = GatedMLP(6, 8, bias=True).double()
    randomize(mlp)
    x = torch.randn(4, 6, dtype=torch.float64)
    gate, up = F.linear(x, mlp.gate_up_proj.weight, mlp.gate_up_proj.bias).chunk(2, dim=1)
    torch.testing.assert_close(mlp(x), F.linear(F.silu(gate) * up, mlp.down_proj.weight, mlp.down_proj.bias))


def test_tied_embedding() -> None:
    table = Embedding(7, 4)
    randomize(table)
    hidden = table(torch.tensor([3, 0], dtype=torch.int32))
    torch.testing.assert_close(hidden, table.weight[[3, 0]])
    torch.testing.assert_close(table.logits(hidden), hidden @ table.weight.T)


def test_linear_accepts_no_rows() -> None:
    assert Linear(4, 9)(torch.zeros(0, 4)).shape == (0, 9)


def one_expert(experts: Experts, expert: int, x: torch.Tensor) -> torch.Tensor:
    gate, up = (experts.gate_up_proj[expert] @ x).chunk(2)
    return experts.down_proj[expert] @ (F.silu(gate) * up)


def test_experts_weigh_the_results_of_their_tokens() -> None:
    experts = Experts(num_experts=5, hidden_size=6, intermediate_size=4).double()
    randomize(experts)
    x, weights = torch.randn(7, 6, dtype=torch.float64), torch.rand(7, 2, dtype=torch.float64)
    chosen = torch.stack([torch.randperm(5)[:2] for _ in range(7)])
    out = experts(x, chosen, weights)
    for token in range(7):
        pairs = zip(chosen[token].tolist(), weights[token], strict=True)
        expected = torch.stack([share * one_expert(experts, expert, x[token]) for expert, share in pairs]).sum(0)
        torch.testing.assert_close(out[token], expected)


def test_experts_without_tokens_are_left_out() -> None:
    experts = Experts(num_experts=9, hidden_size=4, intermediate_size=3)
    randomize(experts)
    experts.gate_up_proj[[0, 1, 2, 4, 5, 6, 7, 8]] = torch.nan
    x = torch.randn(3, 4)
    out = experts(x, torch.full((3, 1), 3), torch.ones(3, 1))
    torch.testing.assert_close(out, torch.stack([one_expert(experts, 3, row) for row in x]))


def test_moe_equals_token_by_token() -> None:
    for normalize in (False, True):
        moe = MoE(hidden_size=6, intermediate_size=5, num_experts=7, experts_per_token=3, normalize=normalize).double()
        randomize(moe)
        x = torch.randn(9, 6, dtype=torch.float64)
        experts = moe.experts
        expected = torch.zeros_like(x)
        for token in range(9):
            probs = (moe.gate.weight @ x[token]).softmax(0)
            chosen = probs.argsort(descending=True)[:3]
            weights = probs[chosen] / probs[chosen].sum() if normalize else probs[chosen]
            for expert, share in zip(chosen.tolist(), weights, strict=True):
                expected[token] += share * one_expert(experts, expert, x[token])
        torch.testing.assert_close(moe(x), expected)


def test_moe_accepts_a_single_token_and_one_expert() -> None:
    moe = MoE(hidden_size=4, intermediate_size=3, num_experts=1, experts_per_token=1, normalize=True)
    randomize(moe)
    assert moe(torch.randn(1, 4)).shape == (1, 4)


# -- divided over ranks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
def test_row_parallel_ranks_add_up_to_the_whole_layer(size: int) -> None:
    """Each has its columns of the weight and its part of the input. The bias is added once."""
    generator = torch.Generator().manual_seed(1)
    x, weight, bias = (torch.randn(shape, generator=generator) for shape in ((3, 12), (5, 12), 5))

    def job(ranks: Communicator) -> torch.Tensor:
        shard = divide("width", 12, ranks)
        layer = RowParallelLinear(shard, 5, bias=True, communicator=ranks)
        layer.weight.copy_(weight[:, shard.start : shard.stop])
        assert layer.bias is not None
        layer.bias.copy_(bias)
        out: torch.Tensor = layer(x[:, shard.start : shard.stop])
        return out

    for out in on_ranks(size, job):
        torch.testing.assert_close(out, x @ weight.T + bias)


def test_a_row_parallel_rank_reads_its_columns_of_the_checkpoint() -> None:
    layer = RowParallelLinear(divide("width", 12, Position(1, 3)), 5)
    checkpoint = torch.arange(60.0).view(5, 12)
    assert torch.equal(layer.shard_specs()["weight"].of(checkpoint), checkpoint[:, 4:8])
