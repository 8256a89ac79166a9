"""Implementations that are broken in one way each, for the suites to notice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

import numpy as np
import torch

from minisgl.attention.torch_backend import TorchAttention
from minisgl.batch import Batch, DeviceBatch
from minisgl.context import AttentionSpec
from minisgl.distributed.communicator import TorchCommunicator
from minisgl.distributed.shared_memory import CAPACITY, SharedMemoryPlane
from minisgl.drafters.ngram import NgramDrafter
from minisgl.drafters.protocol import DraftRow
from minisgl.drafters.suffix import SuffixDrafter
from minisgl.engine.sampler import DefaultSampler, SampledTokens
from minisgl.engine.sampling import DeviceSampling, TokenHistory
from minisgl.kvcache.pool import KVCache
from minisgl.kvcache.prefix import InsertResult, LeastRecentlyUsed
from minisgl.kvcache.radix import Node, RadixCache
from minisgl.layers.quantization import Tensors
from minisgl.layers.quantizers import Fp8, Int4, Int4ZeroPoint, Int8
from minisgl.request import Int32Array, Request
from minisgl.scheduler.policy import LongestPrefixMatch, MemoryDemand, PrefillFirst, Reserve, SchedulerLoad, StepPlan

# -- radix caches --------------------------------------------------------------------------------------------------


class UncheckedCache(RadixCache):
    """Does not check itself: the suite must notice from outside."""

    def check(self) -> None:
        pass


class LosesLocksOnSplit(UncheckedCache):
    """The upper half of a split edge starts without the locks that went through the whole."""

    def _split(self, node: Node, count: int) -> Node:
        upper = super()._split(node, count)
        upper.lock_count = 0
        return upper


class ClaimsDuplicates(UncheckedCache):
    """Answers that it took the offered pages where it kept others: the owner will not re-point its readers."""

    def insert(self, tokens: Int32Array, pages: Int32Array) -> InsertResult:
        return InsertResult(pages.copy(), super().insert(tokens, pages).handle)


class EvictsLocked(UncheckedCache):
    """Looks at no lock when it evicts. All its counters are right."""

    def evict(self, count: int) -> Int32Array:
        locks = {node: node.lock_count for node in self.nodes()}
        for node in locks:
            node.lock_count = 0
            self._queue_if_evictable(node)
        self.num_evictable = self.num_pages
        pages = super().evict(count)
        for node in self.nodes():
            node.lock_count = locks[node]
        self.num_evictable = sum(len(node.pages) for node in self.nodes() if node.lock_count == 0)
        return pages


class ExtendsForOthersToo(UncheckedCache):
    """Makes the last edge longer although another request has locked it, whose own next page has then no place."""

    def extend(self, handle: Node, tokens: Int32Array, page: int) -> Node | None:
        locks, handle.lock_count = handle.lock_count, min(handle.lock_count, 1)
        extended = super().extend(handle, tokens, page)
        handle.lock_count = locks
        return extended


class LocksTheLastNodeAlone(UncheckedCache):
    """A locked leaf stays; the tree has no idea that the way to it is in use."""

    def _path(self, node: Node) -> Iterator[Node]:
        return islice(super()._path(node), 1)


# -- eviction policies ---------------------------------------------------------------------------------------------


class Forgets(LeastRecentlyUsed):
    """Halves all counts now and then, so that ranks fall."""

    def on_use(self, now: int, uses: int) -> int:
        return uses >> (now // 100)


class SearchesItsHistory(LeastRecentlyUsed):
    """Right, and slower with every use."""

    def __init__(self) -> None:
        self.history: list[int] = []

    def on_use(self, now: int, uses: int) -> int:
        self.history.append(now)
        return max(each for each in self.history)


# -- page stores ---------------------------------------------------------------------------------------------------


class RestoresBehindAGap:
    """Looks past a name that it does not have, so that what it fills is no beginning of the prompt."""

    def __init__(self, kv_cache: KVCache) -> None:
        self.kv_cache = kv_cache
        self.kept: dict[bytes, torch.Tensor] = {}

    def save(self, names: Sequence[bytes], pages: Int32Array) -> None:
        content = self.kv_cache.read_pages(torch.tensor(pages, dtype=torch.int64))
        self.kept.update(zip(names, content.unbind(2), strict=True))

    def restore(self, names: Sequence[bytes], pages: Int32Array) -> int:
        found = [self.kept[name] for name in names if name in self.kept]
        if found:
            self.kv_cache.write_pages(torch.tensor(pages[: len(found)], dtype=torch.int64), torch.stack(found, 2))
        return len(found)


# -- scheduling policies -------------------------------------------------------------------------------------------


class StarvesTheUncached(LongestPrefixMatch):
    """A longer cached prefix goes first, however long somebody has waited."""

    def order(self, waiting: Sequence[Request], cached_len: Callable[[Request], int]) -> Iterable[Request]:
        return sorted(waiting, key=lambda request: -cached_len(request))


class HasNoPatience(PrefillFirst):
    """While there are prompts, nobody decodes."""

    def plan(self, load: SchedulerLoad) -> StepPlan:
        return StepPlan(prefill_tokens=load.max_prefill_tokens, decode=False)


class KeepsAPageBack(Reserve):
    """What needs the whole pool never starts."""

    def can_admit(self, demand: MemoryDemand) -> bool:
        return demand.at_most + demand.promised < demand.available


# -- samplers ------------------------------------------------------------------------------------------------------


class ForgetsTheConstraints(DefaultSampler):
    """Every token may follow."""

    def sample(self, logits: torch.Tensor, inputs: DeviceSampling, history: TokenHistory | None) -> SampledTokens:
        return super().sample(logits, replace(inputs, constraint=None), history)


class ConstrainsTheFirstRows(DefaultSampler):
    """Takes the masks in order for those of the first rows."""

    def sample(self, logits: torch.Tensor, inputs: DeviceSampling, history: TokenHistory | None) -> SampledTokens:
        if inputs.constraint is not None:
            rows = torch.arange(len(inputs.constraint.rows), device=logits.device)
            inputs = replace(inputs, constraint=inputs.constraint._replace(rows=rows))
        return super().sample(logits, inputs, history)


# -- attention backends --------------------------------------------------------------------------------------------


class SeesTheNextToken(TorchAttention):
    """Off by one: a token of a prompt sees the one after it, if that is fed in the same step."""

    def _causal_band(self, window: int | None) -> torch.Tensor:
        return super()._causal_band(window).roll(1, dims=-1)


class IgnoresTheWindow(TorchAttention):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        return super().forward(q, k, v, replace(spec, sliding_window=None))


class AttendsBeforeItStores(TorchAttention):
    """Takes the rows one by one: when a row attends, those after it have not stored their keys and values yet."""

    def plan(self, batch: Batch, inputs: DeviceBatch) -> None:
        self._step = batch, inputs

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        batch, inputs = self._step
        out = torch.empty_like(q)
        for row in range(batch.num_rows):
            first, stop = batch.cu_seqlens_q[row : row + 2].tolist()
            alone = replace(
                batch,
                slots=batch.slots[row : row + 1],
                cu_seqlens_q=np.array([0, stop - first], dtype=np.int32),
                seq_lens=batch.seq_lens[row : row + 1],
                positions=batch.positions[first:stop],
                num_decode=int(row < batch.num_decode),
            )
            super().plan(alone, replace(inputs, out_locs=inputs.out_locs[first:stop]))
            out[first:stop] = super().forward(q[first:stop], k[first:stop], v[first:stop], spec)
        return out


class RemembersTheFirstStep(TorchAttention):
    def plan(self, batch: Batch, inputs: DeviceBatch) -> None:
        """Keeps the layouts of the step before."""
        self._batch, self.inputs = batch, inputs


# -- between ranks -------------------------------------------------------------------------------------------------


class GathersItsOwnFirst(TorchCommunicator):
    """Every rank has the others behind itself, and so all ranks have different orders."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return super().all_gather(x).roll(-self.rank * x.shape[1], dims=1)


class CutsLongMessages(SharedMemoryPlane):
    """What does not fit into one record is not sent."""

    def send(self, message: bytes, timeout: float) -> None:
        super().send(message[: CAPACITY // 4], timeout)


class ForgetsTheSlowestRank(SharedMemoryPlane):
    """Writes on as soon as one rank has read."""

    def send(self, message: bytes, timeout: float) -> None:
        self._ring.positions[:] = self._ring.positions.max()
        super().send(message, timeout)


# -- quantisers ----------------------------------------------------------------------------------------------------


class ScalesAllTokensAlike(Int8):
    """One scale for the activations of all tokens, as torch's dynamic quantisation has it."""

    def linear(self, x: torch.Tensor, tensors: Tensors, bias: torch.Tensor | None) -> torch.Tensor:
        scale = x.abs().max() / 127.0 if len(x) else 1.0
        return super().linear((x / scale).round() * scale, tensors, bias)


class ShrinksWeights(Fp8):
    """Leaves room above the largest number, and does not say so in the scale."""

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().quantize(weight * 0.9)


class ForgetsTheZeroPoint(Int4ZeroPoint):
    def linear(self, x: torch.Tensor, tensors: Tensors, bias: torch.Tensor | None) -> torch.Tensor:
        plain = {name: tensor for name, tensor in tensors.items() if name != "weight_zero"}
        return super().linear(x, plain, bias)


class PacksAcrossGroups(Int4):
    """Byte j of a row holds numbers j and j + K/2: a column shard of the bytes is none of the weight."""

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        tensors = super().quantize(weight)
        tensors["weight"] = tensors["weight"].unflatten(1, (2, -1)).transpose(1, 2).flatten(1)
        return tensors

    def dequantize(self, tensors: Tensors) -> torch.Tensor:
        packed = tensors["weight"].unflatten(1, (-1, 2)).transpose(1, 2).flatten(1)
        return super().dequantize({**tensors, "weight": packed})


# -- drafters ------------------------------------------------------------------------------------------------------


class DraftsTooMuch(NgramDrafter):
    """Drafts one token more than it was asked for."""

    def look_up(self, tokens: Int32Array, count: int) -> Int32Array:
        return super().look_up(tokens, count + 1)


class DraftsForTheFirstRow(NgramDrafter):
    """Answers every row with the drafts of the first one."""

    def propose(self, rows: Sequence[DraftRow]) -> list[Int32Array]:
        return super().propose(rows)[:1] * len(rows)


class BelievesItsDrafts(SuffixDrafter):
    """Takes its own drafts for the request's output."""

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        drafts = super().propose(rows)
        for row, guess in zip(rows, drafts, strict=True):
            for token in guess:
                self._sequences[row.uid].own.extend(token)
            self._sequences[row.uid].num_read += len(guess)
        return drafts


class RemembersRequests(SuffixDrafter):
    """Keeps the state of requests that have ended."""

    def finish(self, uid: int, prompt_len: int, tokens: Int32Array) -> None:
        pass
