"""Feed-forward layers: the gated MLP, and the mixture of experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from minisgl.layers.linear import Linear, MergedColumnParallelLinear, RowParallelLinear
from minisgl.layers.sharding import SINGLE_RANK, Communicator, Shard, ShardSpec, WeightPart, divide, empty_parameter


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) × up(x))``, with gate and up as one matrix product. Ranks share its intermediate width."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        communicator: Communicator = SINGLE_RANK,
        packed: bool = False,
    ) -> None:
        super().__init__()
        shard = divide("intermediate_size", intermediate_size, communicator)
        parts = {"gate_proj": shard, "up_proj": shard}
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, parts, bias, packed)
        self.down_proj = RowParallelLinear(shard, hidden_size, bias, communicator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] → [T, hidden_size]."""
        out: torch.Tensor = self.down_proj(silu_and_mul(self.gate_up_proj(x)))
        return out


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) × up`` (SwiGLU, Shazeer 2020). [..., 2 × n], gate before up, → [..., n], same dtype."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


class MoE(nn.Module):
    """A mixture of experts (Shazeer et al. 2017): each token goes through the k experts that its router scores highest.

    The ranks share every expert's intermediate width. With ``normalize``, a token's k weights are scaled to sum to 1.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        experts_per_token: int,
        normalize: bool,
        communicator: Communicator = SINGLE_RANK,
    ) -> None:
        super().__init__()
        shard = divide("moe_intermediate_size", intermediate_size, communicator)
        self.gate = Linear(hidden_size, num_experts)
        self.experts = Experts(num_experts, hidden_size, shard)
        self.communicator = communicator
        self.experts_per_token = experts_per_token
        self.normalize = normalize

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] → [T, hidden_size]."""
        scores = self.gate(x)
        probs = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        weights, experts = probs.topk(self.experts_per_token, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return self.communicator.all_reduce(self.experts(x, experts, weights.to(x.dtype)))


class Experts(nn.Module):
    """The experts of a layer: ``gate_up_proj`` [E, 2 × intermediate_size, hidden_size] and ``down_proj`` [E,
    hidden_size, intermediate_size]. With a shard of the intermediate size, it computes this rank's part of the sum.
    """

    # A CUDA graph cannot record `forward`: it reads on the host how many tokens each expert got.
    capturable: bool = False

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int | Shard) -> None:
        super().__init__()
        self.shard = Shard.whole(intermediate_size) if isinstance(intermediate_size, int) else intermediate_size
        self.gate_up_proj = empty_parameter(num_experts, 2 * self.shard.size, hidden_size)
        self.down_proj = empty_parameter(num_experts, hidden_size, self.shard.size)

    def forward(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] → [T, hidden_size], given each token's expert ids and weights, both [T, k]."""
        # A pair is one token at one of its experts. Sorted by expert, the pairs of an expert are one slice.
        expert_of_pair = experts.flatten()
        pairs = expert_of_pair.argsort(stable=True)
        tokens = pairs // experts.shape[1]
        pair_weights = weights.flatten()[pairs, None]
        counts = expert_of_pair.bincount(minlength=len(self.down_proj)).tolist()

        out = torch.zeros_like(x)
        start = 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            chosen = tokens[start : start + count]
            result = self.compute(expert, x[chosen])
            out.index_add_(0, chosen, result * pair_weights[start : start + count])
            start += count
        return out

    def compute(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """One expert: [N, hidden_size] → [N, hidden_size]."""
        hidden = silu_and_mul(F.linear(x, self.gate_up_proj[expert]))
        return F.linear(hidden, self.down_proj[expert])

    def weight_parts(self) -> list[WeightPart]:
        num_experts, rows, _ = self.gate_up_proj.shape
        gate, up = slice(0, rows // 2), slice(rows // 2, rows)
        by_rows, by_columns = ShardSpec(0, self.shard), ShardSpec(1, self.shard)
        parts: list[WeightPart] = []
        for expert in range(num_experts):
            name = f"experts.{expert}"
            parts.append(WeightPart(f"{name}.gate_proj.weight", "gate_up_proj", (expert, gate), by_rows))
            parts.append(WeightPart(f"{name}.up_proj.weight", "gate_up_proj", (expert, up), by_rows))
            parts.append(WeightPart(f"{name}.down_proj.weight", "down_proj", (expert,), by_columns))
        return parts


class ClampedExperts(Experts):
    """The experts of gpt-oss: with biases, a gated product that is clamped, and the checkpoint's layout of weights.

    ``gate_up_proj`` is [E, hidden_size, 2 × intermediate_size], a gate beside its up, and ``down_proj`` [E,
    intermediate_size, hidden_size].
    """

    ALPHA = 1.702  # x × sigmoid(alpha × x) is about GELU
    LIMIT = 7.0

    def __init__(self, num_experts: int, hidden_size: int, shard: Shard, communicator: Communicator) -> None:
        super().__init__(num_experts, hidden_size, shard)
        self.gate_up_proj = empty_parameter(num_experts, hidden_size, 2 * shard.size)
        self.gate_up_proj_bias = empty_parameter(num_experts, 2 * shard.size)
        self.down_proj = empty_parameter(num_experts, shard.size, hidden_size)
        self.down_proj_bias = empty_parameter(num_experts, hidden_size)
        self.adds_bias = communicator.rank == 0  # to this rank's part of the sum

    def compute(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        gate_up = torch.addmm(self.gate_up_proj_bias[expert], x, self.gate_up_proj[expert])
        gate, up = gate_up[:, ::2].clamp(max=self.LIMIT), gate_up[:, 1::2].clamp(-self.LIMIT, self.LIMIT)
        out = (gate * torch.sigmoid(self.ALPHA * gate) * (up + 1)) @ self.down_proj[expert]
        return out + self.down_proj_bias[expert] if self.adds_bias else out

    def weight_parts(self) -> list[WeightPart]:
        return []

    def shard_specs(self) -> dict[str, ShardSpec]:
        pairs = self.shard.times(2)
        by_pairs = {"gate_up_proj": ShardSpec(2, pairs), "gate_up_proj_bias": ShardSpec(1, pairs)}
        return {**by_pairs, "down_proj": ShardSpec(1, self.shard)}


class ClampedMoE(MoE):
    """A mixture of `ClampedExperts`, whose router has a bias."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        experts_per_token: int,
        normalize: bool,
        communicator: Communicator = SINGLE_RANK,
    ) -> None:
        super().__init__(hidden_size, intermediate_size, num_experts, experts_per_token, normalize, communicator)
        self.gate = Linear(hidden_size, num_experts, bias=True)
        self.experts = ClampedExperts(num_experts, hidden_size, self.experts.shard, communicator)
