"""Paged attention against a loop over tokens, in memory that is NaN wherever nothing was written."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from minisgl.attention import torch_backend
from minisgl.attention.torch_backend import TorchAttention
from minisgl.context import AttentionSpec
from minisgl.kvcache.pool import KVCache
from tests.steps import naive_attention, step_of

CPU = torch.device("cpu")
SPEC = AttentionSpec(layer_id=1, num_heads=6, num_kv_heads=2, head_dim=8, scale=0.3)


Sequences = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def nan_cache(page_size: int, pages: int, dtype: torch.dtype) -> KVCache:
    cache = KVCache(2, 2, 8, pages, page_size, dtype, CPU)
    cache.k.fill_(torch.nan)
    cache.v.fill_(torch.nan)
    return cache


def random_sequences(lengths: list[int], dtype: torch.dtype) -> Sequences:
    """q, k and v of each whole sequence."""
    generator = torch.Generator().manual_seed(3)

    def draw(length: int, heads: int) -> torch.Tensor:
        return torch.randn(length, heads, 8, generator=generator, dtype=torch.float64).to(dtype)

    return [(draw(length, 6), draw(length, 2), draw(length, 2)) for length in lengths]


def attend(
    q_lens: list[int], kv_lens: list[int], page_size: int, dtype: torch.dtype, window: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step over random sequences whose first ``kv_lens`` positions are in the cache: ours and the naive result."""
    spec = dataclasses.replace(SPEC, sliding_window=window)
    lengths = [q + kv for q, kv in zip(q_lens, kv_lens, strict=True)]
    sequences = random_sequences(lengths, dtype)
    batch, inputs = step_of(q_lens, kv_lens, page_size)
    cache = nan_cache(page_size, int(inputs.page_table.max()) + 1, dtype)
    for row, (_, k, v) in enumerate(sequences):
        positions = torch.arange(kv_lens[row])
        locs = inputs.page_table[row, positions // page_size] * page_size + positions % page_size
        cache.store(spec.layer_id, k[: kv_lens[row]], v[: kv_lens[row]], locs)
    fed = [tuple(x[kv:] for x in sequence) for sequence, kv in zip(sequences, kv_lens, strict=True)]
    q, k, v = (torch.cat(parts) for parts in zip(*fed, strict=True))
    backend = TorchAttention(cache)
    backend.plan(batch, inputs)
    ours = backend.forward(q, k, v, spec)
    naive = [naive_attention(*sequence, spec)[kv:] for sequence, kv in zip(sequences, kv_lens, strict=True)]
    return ours, torch.cat(naive)


STEPS = {
    "prefill": ([5, 1, 17], [0, 0, 0]),
    "prefill-behind-a-prefix": ([5, 20], [8, 3]),
    "decode-one": ([1], [30]),
    "decode-of-one-length": ([1, 1, 1], [11, 11, 11]),
    "decode-of-many-lengths": ([1] * 7, [3, 200, 1, 90, 31, 250, 199]),
    "mixed": ([1, 1, 1, 9, 1, 4], [120, 2, 16, 0, 0, 33]),
    "prefill-of-several-tiles": ([600, 257], [70, 0]),
}


@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("window", [None, 1, 6, 100])
@pytest.mark.parametrize("step", list(STEPS))
def test_equals_the_naive_loop(step: str, window: int | None, page_size: int) -> None:
    ours, naive = attend(*STEPS[step], page_size, torch.float64, window)
    assert ours.dtype == torch.float64
    torch.testing.assert_close(ours, naive, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_keeps_the_dtype(dtype: torch.dtype, tolerance: float) -> None:
    ours, naive = attend(*STEPS["mixed"], 4, dtype)
    assert ours.dtype == dtype
    torch.testing.assert_close(ours, naive, rtol=0, atol=tolerance)


def test_keys_are_where_the_page_table_says_and_nothing_past_a_rows_end_is_read() -> None:
    """Every place of the cache holds its own number."""
    batch, inputs = step_of([1, 1, 1], [5, 9, 1], page_size=4)
    cache = nan_cache(4, int(inputs.page_table.max()) + 1, torch.float32)
    places = torch.arange(cache.k[1, ..., 0, 0].numel()).float()
    cache.k[1], cache.v[1] = (x.view(-1, 4, 1, 1).expand_as(cache.k[1]) for x in (places, -places))
    backend = TorchAttention(cache)
    backend.plan(batch, inputs)
    starts = [2, 0]
    locs = backend._locs([1, 2], np.array(starts, dtype=np.int32), 8, None)
    expected = torch.empty(2, 8, dtype=torch.long)
    for line, (row, start) in enumerate(zip([1, 2], starts, strict=True)):
        for column in range(8):
            position = min(start + column, int(batch.seq_lens[row]) - 1)
            expected[line, column] = inputs.page_table[row, position // 4] * 4 + position % 4
    assert locs.tolist() == expected.tolist(), "past its end, a row's last position again"
    backend._scratch = torch.empty(2, 20, 2, 8)
    keys, values = backend._gather(locs, 1)
    assert keys.shape == values.shape == (2, 8, 2, 8)
    assert torch.equal(keys[..., 1, 7], expected.float())
    assert torch.equal(values, -keys)


def test_large_decode_batches_are_gathered_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "_GROUP_KEYS", 64)
    kv_lens = [int(x) for x in np.random.default_rng(0).integers(1, 90, 20)]
    ours, naive = attend([1] * 20, kv_lens, 4, torch.float64)
    torch.testing.assert_close(ours, naive, rtol=0, atol=1e-12)


def test_a_row_may_read_pages_that_another_row_of_the_step_writes() -> None:
    q, k, v = random_sequences([8], torch.float64)[0]
    batch, inputs = step_of([4, 4], [0, 4], page_size=4)
    cache = nan_cache(4, int(inputs.page_table.max()) + 1, torch.float64)
    inputs.page_table[1, 0] = inputs.page_table[0, 0]  # row 1 continues the prefix that row 0 computes now
    backend = TorchAttention(cache)
    backend.plan(batch, inputs)
    ours = backend.forward(q, k, v, SPEC)
    torch.testing.assert_close(ours, naive_attention(q, k, v, SPEC), rtol=0, atol=1e-12)


def test_layers_keep_their_own_keys_and_share_the_layout_of_a_step() -> None:
    q, k, v = random_sequences([6], torch.float64)[0]
    batch, inputs = step_of([6], [0], page_size=4)
    cache = nan_cache(4, int(inputs.page_table.max()) + 1, torch.float64)
    backend = TorchAttention(cache)
    backend.plan(batch, inputs)
    first = dataclasses.replace(SPEC, layer_id=0)
    out = [backend.forward(q, k * sign, v, spec) for spec, sign in ((first, 1), (SPEC, -1))]
    torch.testing.assert_close(out[0], naive_attention(q, k, v, first), rtol=0, atol=1e-12)
    torch.testing.assert_close(out[1], naive_attention(q, -k, v, SPEC), rtol=0, atol=1e-12)
    windowed = dataclasses.replace(SPEC, sliding_window=2)
    torch.testing.assert_close(backend.forward(q, k, v, windowed), naive_attention(q, k, v, windowed))


def test_similar_lengths_bounds_padding_and_size() -> None:
    lengths = np.random.default_rng(1).integers(1, 1500, 300).astype(np.int32)
    groups = torch_backend._similar_lengths(lengths)
    assert sorted(row for group in groups for row in group) == list(range(300))
    for group in groups:
        longest, shortest = int(lengths[group].max()), int(lengths[group].min())
        assert longest - shortest <= max(64, shortest // 3)
        assert len(group) == 1 or longest * len(group) <= torch_backend._GROUP_KEYS
    assert len(groups) < 200
