"""The keys and values themselves: two tensors a layer, cut into pages."""

from __future__ import annotations

import torch


class KVCache:
    """KV memory of all layers, [layers, num_pages + 1, page_size, num_kv_heads, head_dim], keys and values apart.

    The page after the last is the dummy page (see `PageTable`).

    Args:
        num_layers, num_kv_heads, head_dim: of the model, on this rank.
        num_pages: usable pages.
        page_size: tokens a page.
        dtype, device: of the tensors. Memory is not cleared: a position is always written before it is read.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        shape = (num_layers, num_pages + 1, page_size, num_kv_heads, head_dim)
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        # Padded graph rows read the dummy page; masked-out garbage must at least be finite.
        self.k[:, num_pages].zero_()
        self.v[:, num_pages].zero_()

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor, out_locs: torch.Tensor) -> None:
        """Write this step's keys and values.

        Args:
            layer: layer index.
            k, v: [T, num_kv_heads, head_dim].
            out_locs: [T] int32, page id × page_size + offset of each token.
        """
        locs = out_locs.long()
        self.k[layer].flatten(0, 1).index_copy_(0, locs, k)
        self.v[layer].flatten(0, 1).index_copy_(0, locs, v)
