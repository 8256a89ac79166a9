"""The token embedding, which is also the LM head where a model ties the two."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from minisgl.layers.weights import weight


class Embedding(nn.Module):
    """A row a token id.

    Args:
        vocab_size, hidden_size: shape of the table.
    """

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = weight(vocab_size, hidden_size)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[T] int32 → [T, hidden_size]."""
        return F.embedding(input_ids, self.weight)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, hidden_size] → [S, vocab_size]: the table as a tied LM head (Press and Wolf 2017)."""
        return F.linear(hidden, self.weight)
