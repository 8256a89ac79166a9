"""Parts that fail on one rank only, for ranks to find by their paths."""

from __future__ import annotations

import torch
import torch.distributed as dist

from minisgl.core import AttentionSpec
from minisgl.distributed import TorchCommunicator
from minisgl.kvcache.kv_cache import KVCache
from minisgl.kvcache.page_store import NoPageStore
from minisgl.kvcache.torch_attention import TorchAttention


class Store(NoPageStore):
    """A page store that is not the default."""


class FailsOnRank1(TorchAttention):
    """Attention that raises after a few steps, on rank 1."""

    def __init__(self, kv_cache: KVCache) -> None:
        super().__init__(kv_cache)
        self.calls = 0

    def attend(self, q: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        self.calls += 1
        if self.calls > 10 and dist.get_rank() == 1:
            raise ArithmeticError("the abacus is broken")
        return super().attend(q, spec)


class WrongOnRank1(TorchCommunicator):
    """Rank 1 gathers other numbers than the rest."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        gathered = super().all_gather(x)
        return gathered.flip(-1) if self.rank == 1 and x.is_floating_point() else gathered
