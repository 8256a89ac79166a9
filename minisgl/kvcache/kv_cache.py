"""The keys and values themselves: two tensors for all layers, cut into pages."""

from __future__ import annotations

import torch


class KVCache:
    """KV memory of all layers, [layers, num_pages + 1, page_size, num_kv_heads, head_dim], keys and values apart.

    The page after the last is the dummy page (see `PageTable`).

    Args:
        num_layers, num_kv_heads, head_dim: of the model, on this rank.
        num_pages: usable pages.
        page_size: tokens a page.
        dtype: of the keys and values that are stored and attended to, the model's.
        device: of the memory, which is not cleared: a position is always written before it is read.
        kv_dtype: the stored dtype; None is ``dtype``, ``torch.float8_e4m3fn`` takes half of 16 bits. There is no
            scale beside such a key or value. It has three bits of mantissa at every magnitude from 2⁻⁶ to 448, so a
            scale that brings values nearer to 448 makes none of them more exact. Keys are far below that behind the
            norm and the rotation, and so are values; the rare larger one is cut off. Engines scale by 1 as well, where
            a checkpoint does not say otherwise (vLLM, SGLang).
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
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.dtype = dtype
        self.num_pages = num_pages
        self.page_size = page_size
        shape = (num_layers, num_pages + 1, page_size, num_kv_heads, head_dim)
        self.k = torch.empty(shape, dtype=kv_dtype or dtype, device=device)
        self.v = torch.empty(shape, dtype=kv_dtype or dtype, device=device)
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
        for memory, new in ((self.k[layer], k), (self.v[layer], v)):
            byte_view(memory).flatten(0, 1).index_copy_(0, locs, byte_view(to_kv_dtype(new, memory.dtype)))

    def read_pages(self, pages: torch.Tensor) -> torch.Tensor:
        """A copy of whole pages, [2, layers, n, page_size, num_kv_heads, head_dim], keys first; ``pages`` is int64[n].

        The numbers are as they lie in memory: those of eight bits are bytes.
        """
        return torch.stack([byte_view(memory).index_select(1, pages) for memory in (self.k, self.v)])

    def write_pages(self, pages: torch.Tensor, content: torch.Tensor) -> None:
        """Put back what `read_pages` returned, into the same or other pages."""
        for memory, saved in zip((self.k, self.v), content, strict=True):
            byte_view(memory).index_copy_(1, pages, saved)


def to_kv_dtype(x: torch.Tensor, kv_dtype: torch.dtype) -> torch.Tensor:
    """``x`` in the dtype of the KV memory. What is too large for eight bits becomes the largest number they hold;
    PyTorch alone makes NaN of it."""
    if kv_dtype.itemsize == 1:
        largest = torch.finfo(kv_dtype).max
        x = x.clamp(-largest, largest)
    return x.to(kv_dtype)


def byte_view(x: torch.Tensor) -> torch.Tensor:
    """The same memory, as PyTorch can index it on every device: numbers of eight bits as plain bytes."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
