"""Steps over paged KV memory for tests of attention backends."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from minisgl.batch import Batch, DeviceBatch, build_batch
from minisgl.context import AttentionBackend, AttentionSpec
from minisgl.kvcache.pool import KVCache
from tests.steps import device_batch, naive_attention

TOLERANCES = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
"""How far outputs of about 1 may be from those computed in float64."""


@dataclass(frozen=True)
class Step:
    """A step as a backend gets it, and what it must answer.

    Args:
        layers: q, k and v of each layer, padded rows included, and the output of the real rows, float64 on the CPU.
    """

    batch: Batch
    inputs: DeviceBatch
    layers: list[tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]]


class PagedSequences:
    """Random sequences, row r in slot ``slots[r]``, and a backend over paged memory that is as unkind as an engine's.

    What was never written is ``garbage``; pages and slots are in random order; page-table entries past the end of a
    sequence point to a page of garbage; the table's last row points to the dummy page.

    Args:
        make_backend: the factory under test.
        device: of the KV memory and the steps.
        specs: the layers, layer i with ``layer_id`` i.
        lengths: tokens of each whole sequence.
        dtype, kv_dtype: of q, k and v, and of KV memory, as of a `KVCache`.
        seed: of pages and slots. The sequences do not depend on it.
    """

    def __init__(
        self,
        make_backend: Callable[[KVCache], AttentionBackend],
        device: torch.device,
        specs: Sequence[AttentionSpec],
        lengths: Sequence[int],
        page_size: int = 4,
        dtype: torch.dtype = torch.float32,
        garbage: float = torch.nan,
        seed: int = 0,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        rows, width = len(lengths), -(-max(lengths) // page_size)
        num_pages = rows * width + 1
        num_kv_heads, head_dim = specs[0].num_kv_heads, specs[0].head_dim
        self.specs = specs
        self.device = device
        self.kv_cache = KVCache(len(specs), num_kv_heads, head_dim, num_pages, page_size, dtype, device, kv_dtype)
        for memory in (self.kv_cache.k, self.kv_cache.v):
            memory[:, :num_pages] = torch.tensor(garbage).to(memory.dtype)
        rng = np.random.default_rng(seed)
        *pages, never_written = rng.permutation(num_pages)
        self.slots = rng.permutation(rows + 2)[:rows].astype(np.int32)
        self.page_table = np.full((rows + 3, width + 1), never_written, dtype=np.int32)
        self.page_table[self.slots, :width] = np.reshape(pages, (rows, width))
        for slot, length in zip(self.slots, lengths, strict=True):
            self.page_table[slot, -(-length // page_size) :] = never_written
        self.page_table[-1] = num_pages
        self._told = np.full_like(self.page_table, -1)
        self.kv_lens = np.zeros(rows, dtype=np.int32)
        generator = torch.Generator().manual_seed(3)

        def draw(heads: int) -> list[torch.Tensor]:
            return [torch.randn(length, heads, head_dim, generator=generator).to(dtype) for length in lengths]

        self.sequences = [(draw(spec.num_heads), draw(num_kv_heads), draw(num_kv_heads)) for spec in specs]
        self.backend = make_backend(self.kv_cache)

    def share(self, row: int, source: int, num_pages: int) -> None:
        """Let ``row`` begin with the first pages of ``source``, and with their keys and values."""
        self.page_table[self.slots[row], :num_pages] = self.page_table[self.slots[source], :num_pages]
        tokens = num_pages * self.kv_cache.page_size
        for _, k, v in self.sequences:
            k[row][:tokens] = k[source][:tokens]
            v[row][:tokens] = v[source][:tokens]

    def fill(self, kv_lens: Sequence[int]) -> None:
        """Put the first ``kv_lens`` positions of each row into memory, as earlier steps would have done."""
        page_size = self.kv_cache.page_size
        for row, kv_len in enumerate(kv_lens):
            positions = np.arange(kv_len)
            pages = self.page_table[self.slots[row], positions // page_size]
            locs = torch.from_numpy(pages * page_size + positions % page_size).to(self.device)
            for layer, (_, k, v) in enumerate(self.sequences):
                self.kv_cache.store(layer, k[row][:kv_len].to(self.device), v[row][:kv_len].to(self.device), locs)
        self.kv_lens[:] = kv_lens

    def step(self, feeds: Mapping[int, int], num_decode: int | None = None, padding: int = 0) -> Step:
        """Feed the next tokens of some rows, which are in memory from then on.

        Args:
            feeds: row → number of tokens, in the order of the batch.
            num_decode: leading decode rows; None counts the leading rows of one token behind a prefix.
            padding: rows of one token on the dummy page that follow.
        """
        rows, q_lens = list(feeds), np.array(list(feeds.values()), dtype=np.int32)
        kv_lens = self.kv_lens[rows]
        spans = list(zip(rows, kv_lens.tolist(), (kv_lens + q_lens).tolist(), strict=True))
        self.kv_lens[rows] += q_lens
        changed = np.flatnonzero(self.page_table != self._told).astype(np.int32)
        self._told = self.page_table.copy()
        if num_decode is None:
            num_decode = int(np.logical_and.accumulate((q_lens == 1) & (kv_lens > 0)).sum())
        batch = build_batch(
            np.append(self.slots[rows], [len(self.page_table) - 1] * padding).astype(np.int32),
            np.append(q_lens, [1] * padding).astype(np.int32),
            np.append(kv_lens, [0] * padding).astype(np.int32),
            self.page_table,
            self.kv_cache.page_size,
            sample_rows=np.zeros(0, dtype=np.int32),
            output_index=np.zeros(0, dtype=np.int32),
            num_decode=num_decode + padding,
            page_index=changed,
            page_value=self.page_table.reshape(-1)[changed],
        )

        def fed(whole: list[torch.Tensor]) -> torch.Tensor:
            parts = [whole[row][start:stop] for row, start, stop in spans]
            return torch.cat([*parts, whole[0].new_ones(padding, *whole[0].shape[1:])]).to(self.device)

        def kept(whole: torch.Tensor) -> torch.Tensor:
            return whole.to(self.kv_cache.k.dtype).to(whole.dtype)

        layers = []
        for spec, (q, k, v) in zip(self.specs, self.sequences, strict=True):
            expected = [
                naive_attention(q[row][start:stop].double(), kept(k[row][:stop]), kept(v[row][:stop]), spec, start)
                for row, start, stop in spans
            ]
            layers.append(((fed(q), fed(k), fed(v)), torch.cat(expected)))
        ids = np.zeros(batch.num_tokens, dtype=np.int32)
        return Step(batch, device_batch(batch, ids, self.page_table.copy(), self.device), layers)

    def outputs(self, step: Step) -> list[torch.Tensor]:
        """Run a step; what the backend answers for each layer."""
        self.backend.plan(step.batch, step.inputs)
        return [self.backend.forward(*qkv, spec) for (qkv, _), spec in zip(step.layers, self.specs, strict=True)]

    def check(self, outputs: Sequence[torch.Tensor], step: Step) -> None:
        """Compare the outputs of all layers with the naive ones; those of padded rows may be anything."""
        for out, ((q, _, _), expected) in zip(outputs, step.layers, strict=True):
            assert out.shape == q.shape
            assert out.dtype == q.dtype
            tolerance = TOLERANCES[out.dtype]
            torch.testing.assert_close(out[: len(expected)].double().cpu(), expected, rtol=0, atol=tolerance)

    def run(self, feeds: Mapping[int, int], num_decode: int | None = None) -> None:
        """Run and check one step."""
        step = self.step(feeds, num_decode)
        self.check(self.outputs(step), step)
