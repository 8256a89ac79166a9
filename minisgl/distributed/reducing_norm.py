"""The norm behind a row-parallel product, which takes the sum over the ranks upon itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from minisgl.distributed.peer_all_reduce import PeerAllReduce
from minisgl.kernels.norm import add_and_norm
from minisgl.layers import RMSNorm


class ReducingRMSNorm(RMSNorm):
    """Sum over the ranks, residual addition and norm: one kernel where that is faster, and else one after the other.

    All norms of a decoder that stand behind a product of the ranks are exchanged, or none: between two of them the
    residual stream may be spread over the ranks. The product must no longer add up by itself.

    Args:
        norm: to replace.
        all_reduce: sum over the ranks of any tensor.
        peers: which of them it sums in one kernel.
    """

    def __init__(self, norm: RMSNorm, all_reduce: Callable[[torch.Tensor], torch.Tensor], peers: PeerAllReduce) -> None:
        nn.Module.__init__(self)
        self.weight, self.eps = norm.weight, norm.eps
        self._all_reduce, self._peers = all_reduce, peers

    def add_and_norm(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RMSNorm.add_and_norm`, with ``x`` the part of it that this rank has computed."""
        if self._peers.fits_norm(x):
            return self._peers.add_and_norm(x, residual, self.weight, self.eps)
        return add_and_norm(self._all_reduce(x), residual, self.weight, self.eps)
