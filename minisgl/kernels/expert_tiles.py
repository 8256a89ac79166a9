"""Who goes through which expert, sorted on the device into tiles.

A *pair* is one token at one of its experts: T tokens with k experts each are T × k pairs. A matrix product works on
tiles of rows that all meet the same weights, so the pairs are sorted by expert, and those of each expert are cut into
tiles, the last of which may be partly empty.

How many tiles an expert gets is known to the device alone. A host that asked would wait for it, and a CUDA graph cannot
wait. So here the number of tiles depends on shapes alone: it is what the worst routing needs, and tiles that are left
over hold no rows. vLLM's fused mixture of experts (Kwon et al. 2023) has the same idea, with rows padded in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from minisgl.kernels.launch import pdl_launch_args, tile_range

_LARGEST_BLOCK = 2048


@triton.jit(do_not_specialize=["num_pairs"])
def _sort_kernel(
    experts_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    tile_expert_ptr: tl.tensor,
    tile_begin_ptr: tl.tensor,
    tile_end_ptr: tl.tensor,
    num_pairs: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """Program e: put the pairs of expert e behind those of all smaller ones, and cut them into tiles.

    It reads the list of pairs twice, BLOCK at a time: to count, then to write. Each program does so for itself, since
    the list is short and comes from the cache.

    experts: int[num_pairs] expert of each pair. pairs: int32[num_pairs], sorted by expert, else in order. tile_*:
    int32[tiles], see `ExpertTiles`.
    """
    expert = tl.program_id(0)
    within = tl.arange(0, BLOCK)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    smaller = tl.zeros((BLOCK,), dtype=tl.int32)
    own = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in tile_range(0, num_pairs, BLOCK):
        pair = start + within
        chosen = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=tl.num_programs(0))
        smaller += (chosen < expert).to(tl.int32)
        own += (chosen == expert).to(tl.int32)
    begin = tl.sum(smaller, axis=0)
    end = begin + tl.sum(own, axis=0)

    written = begin
    for start in tile_range(0, num_pairs, BLOCK):
        pair = start + within
        chosen = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=tl.num_programs(0))
        is_own = (chosen == expert).to(tl.int32)
        tl.store(pairs_ptr + written + tl.cumsum(is_own, axis=0) - 1, pair, mask=is_own == 1)
        written += tl.sum(is_own, axis=0)

    first, stop = _first_tile(expert, begin, ROWS), _first_tile(expert + 1, end, ROWS)
    for start in tile_range(first, stop, BLOCK):
        tile = start + within
        tl.store(tile_expert_ptr + tile, expert, mask=tile < stop)
        tl.store(tile_begin_ptr + tile, begin + (tile - first) * ROWS, mask=tile < stop)
        tl.store(tile_end_ptr + tile, end, mask=tile < stop)


@triton.jit
def _first_tile(expert: tl.tensor, begin: tl.tensor, ROWS: tl.constexpr) -> tl.tensor:
    """Where the tiles of an expert start whose pairs start at ``begin``, without asking how many the others have.

    ``begin`` pairs fill no more than ``begin // ROWS`` tiles, and each expert before has at most one that is not full.
    Nor do they need more tiles than there are pairs.
    """
    return tl.minimum(begin, expert + begin // ROWS)


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Pairs, sorted and cut. Tile t is ``pairs[begins[t] : min(begins[t] + rows, ends[t])]``, which may be nothing.

    Args:
        pairs: int32[T × k]; pair p is token ``p // k``.
        experts: int32[tiles] whose weights a tile meets.
        begins, ends: int32[tiles] the first place of a tile, and the one behind its expert's last pair.
        rows: most pairs of a tile.
    """

    pairs: torch.Tensor
    experts: torch.Tensor
    begins: torch.Tensor
    ends: torch.Tensor
    rows: int


def expert_tiles(experts: torch.Tensor, num_experts: int, rows: int) -> ExpertTiles:
    """Sort pairs by expert.

    Args:
        experts: int[T, k] experts of each token, contiguous.
        num_experts: E.
        rows: most pairs of a tile.
    """
    num_pairs = experts.numel()
    num_tiles = min(num_pairs, num_experts + num_pairs // rows)
    pairs = torch.empty(num_pairs, dtype=torch.int32, device=experts.device)
    tile_experts, begins, ends = torch.empty((3, num_tiles), dtype=torch.int32, device=experts.device)
    block = min(max(triton.next_power_of_2(num_pairs), 32), _LARGEST_BLOCK)
    _sort_kernel[(num_experts,)](
        experts,
        pairs,
        tile_experts,
        begins,
        ends,
        num_pairs,
        ROWS=rows,
        BLOCK=block,
        num_warps=min(max(block // 256, 1), 8),
        **pdl_launch_args(experts),
    )
    return ExpertTiles(pairs, tile_experts, begins, ends, rows)
