"""The token embedding, and the LM head, which many models tie to it: the two ends that are as long as the vocabulary.

Where ranks share the model, each holds some rows of both tables.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from minisgl.layers.linear import Linear
from minisgl.layers.sharding import SINGLE_RANK, Communicator, ShardSpec, divide_vocabulary, weight


class Embedding(nn.Module):
    """A row a token id.

    Args:
        vocab_size, hidden_size: shape of the table.
        communicator: joins the ranks that share its rows.
    """

    def __init__(self, vocab_size: int, hidden_size: int, communicator: Communicator = SINGLE_RANK) -> None:
        super().__init__()
        self.shard = divide_vocabulary(vocab_size, communicator)
        self.communicator = communicator
        self.weight = weight(self.shard.size, hidden_size)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[T] int32 → [T, hidden_size]. A rank has zeros for the rows that it does not hold; the sum has them all."""
        if self.communicator.size == 1:
            return F.embedding(input_ids, self.weight)
        row = input_ids - self.shard.start
        elsewhere = (row < 0) | (row >= self.shard.size)
        rows = F.embedding(row.masked_fill(elsewhere, 0), self.weight)
        return self.communicator.all_reduce(rows.masked_fill_(elsewhere.unsqueeze(-1), 0.0))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, hidden_size] → [S, vocab_size]: the table as a tied LM head (Press and Wolf 2017)."""
        return self.complete(F.linear(hidden, self.weight))

    def complete(self, logits: torch.Tensor) -> torch.Tensor:
        """This rank's logits, [S, rows], → those of all ranks, [S, vocab_size]."""
        return _complete(logits, self.shard.total, self.communicator)

    def shard_specs(self) -> dict[str, ShardSpec]:
        return {"weight": ShardSpec(0, self.shard)}


class LMHead(Linear):
    """A score for every token id.

    Args:
        hidden_size, vocab_size: widths of input and output.
        communicator: joins the ranks that share its rows.
    """

    def __init__(self, hidden_size: int, vocab_size: int, communicator: Communicator = SINGLE_RANK) -> None:
        self.shard = divide_vocabulary(vocab_size, communicator)
        super().__init__(hidden_size, self.shard.size)
        self.communicator = communicator

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, hidden_size] → [S, vocab_size]."""
        return self.complete(super().forward(hidden))

    def complete(self, logits: torch.Tensor) -> torch.Tensor:
        """See `Embedding.complete`."""
        return _complete(logits, self.shard.total, self.communicator)

    def shard_specs(self) -> dict[str, ShardSpec]:
        return {"weight": ShardSpec(0, self.shard)}


def _complete(logits: torch.Tensor, vocab_size: int, communicator: Communicator) -> torch.Tensor:
    logits = communicator.all_gather(logits)
    return logits if logits.shape[1] == vocab_size else logits[:, :vocab_size].contiguous()
