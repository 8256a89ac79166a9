"""The token embedding and the LM head. If ranks share the model, each holds some rows of both tables."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from minisgl.layers.linear import Linear, Weight, linear
from minisgl.layers.quantization import QuantizedWeight
from minisgl.layers.quantizers import RoundedRows
from minisgl.layers.sharding import SINGLE_RANK, Communicator, ShardSpec, divide_vocabulary, empty_parameter


class Embedding(nn.Module):
    """A table with one row a token id."""

    def __init__(self, vocab_size: int, hidden_size: int, communicator: Communicator = SINGLE_RANK) -> None:
        super().__init__()
        self.shard = divide_vocabulary(vocab_size, communicator)
        self.hidden_size = hidden_size
        self.communicator = communicator
        self.weight: Weight = empty_parameter(self.shard.size, hidden_size)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[T] int32 → [T, hidden_size]."""
        if self.communicator.size == 1:
            return self._rows(input_ids)
        # Each row is on one rank. The others have zeros in its place, so the sum has all rows.
        row = input_ids - self.shard.start
        elsewhere = (row < 0) | (row >= self.shard.size)
        rows = self._rows(row.masked_fill(elsewhere, 0))
        return self.communicator.all_reduce(rows.masked_fill_(elsewhere.unsqueeze(-1), 0.0))

    def _rows(self, ids: torch.Tensor) -> torch.Tensor:
        if isinstance(self.weight, QuantizedWeight):
            return self.weight.lookup(ids)
        return F.embedding(ids, self.weight)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, hidden_size] → [S, vocab_size]: the table as a tied LM head (Press and Wolf 2017)."""
        return self.gather_logits(linear(hidden, self.weight, None))

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """This rank's logits, [S, shard.size] → those of all ranks, [S, vocab_size]."""
        return _gather_logits(logits, self.shard.total, self.communicator)

    def shard_specs(self) -> dict[str, ShardSpec]:
        return {"weight": ShardSpec(0, self.shard)}


class LMHead(Linear):
    """A linear layer with one output, a logit, for every token id."""

    def __init__(self, hidden_size: int, vocab_size: int, communicator: Communicator = SINGLE_RANK) -> None:
        self.shard = divide_vocabulary(vocab_size, communicator)
        super().__init__(hidden_size, self.shard.size)
        self.communicator = communicator

    def forward(self, hidden: torch.Tensor | RoundedRows) -> torch.Tensor:
        """[S, hidden_size] → [S, vocab_size]."""
        return self.gather_logits(super().forward(hidden))

    def gather_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return _gather_logits(logits, self.shard.total, self.communicator)

    def shard_specs(self) -> dict[str, ShardSpec]:
        return {"weight": ShardSpec(0, self.shard)}


def _gather_logits(logits: torch.Tensor, vocab_size: int, communicator: Communicator) -> torch.Tensor:
    logits = communicator.all_gather(logits)
    return logits if logits.shape[1] == vocab_size else logits[:, :vocab_size].contiguous()
