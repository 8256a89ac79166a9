"""Looking at a running engine: its pages, prefix cache, requests and last steps as a `LiveState`."""

from __future__ import annotations

import heapq
import time
from collections import Counter, deque
from collections.abc import Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from minisgl.batch import Batch, StepPhase
from minisgl.core import EngineCore
from minisgl.kvcache.block_hash import Block, BlockHashCache
from minisgl.kvcache.prefix import PrefixCache
from minisgl.kvcache.radix import Node, RadixCache
from minisgl.request import Int32Array, Request, RequestState
from minisgl.scheduler.memory import KVMemory
from minisgl.server.live.state import (
    HEAD,
    MOST_CELLS,
    MOST_FINISHED,
    MOST_NODE_PAGES,
    MOST_NODES,
    MOST_RUNNING,
    MOST_SLICES,
    MOST_WAITING,
    LiveNode,
    LiveRequest,
    LiveSlice,
    LiveState,
    PageRun,
)
from minisgl.table import RunningTable

MOST_VISITED = 4000  # nodes or blocks; a larger tree is shown in part, so that a look does not delay the engine


def nodes_of(cache: PrefixCache) -> tuple[list[LiveNode], int]:
    """At most `MOST_NODES` nodes of a prefix cache, parents first, and the number of nodes visited.

    The most recently used ones where the cache knows. None for a cache of an unknown kind.
    """
    if isinstance(cache, RadixCache):
        visited = list(islice(cache.nodes(), MOST_VISITED))
        # A parent is used whenever its child is, and precedes it among equals: no node is without its parent.
        latest = heapq.nlargest(MOST_NODES, visited, key=lambda node: node.last_access)
        return [_node(node) for node in latest], len(visited)
    if isinstance(cache, BlockHashCache):
        chains = _chain_nodes(list(islice(cache.blocks(), MOST_VISITED)), cache.page_size)
        return chains[:MOST_NODES], len(chains)
    return [], 0


def _node(node: Node) -> LiveNode:
    assert node.parent is not None
    return LiveNode(
        uid=node.uid,
        parent=node.parent.uid,
        tokens=len(node.tokens),
        num_pages=len(node.pages),
        pages=node.pages[:MOST_NODE_PAGES].tolist(),
        locks=node.lock_count,
        last_used=node.last_access,
        head=node.tokens[:HEAD].tolist(),
    )


def _chains(blocks: list[Block]) -> tuple[list[list[Block]], dict[Block, list[Block]]]:
    """Chain blocks while each has one successor with as many references; return the chains and every block's chain."""
    successors = Counter(block.parent for block in blocks)
    chain_of: dict[Block, list[Block]] = {}
    chains: list[list[Block]] = []
    for block in blocks:
        parent = block.parent
        if parent in chain_of and successors[parent] == 1 and parent.ref_count == block.ref_count:
            chain = chain_of[parent]
        else:
            chain = []
            chains.append(chain)
        chain.append(block)
        chain_of[block] = chain
    return chains, chain_of


def _chain_nodes(blocks: list[Block], page_size: int) -> list[LiveNode]:
    """Chains of blocks as nodes. A chain's uid is its first page + 1, because 0 is the root."""
    chains, chain_of = _chains(blocks)
    nodes = []
    for chain in chains:
        parent = chain_of.get(chain[0].parent) if chain[0].parent is not None else None
        head: Int32Array = np.frombuffer(b"".join(block.tokens for block in chain[:HEAD]), dtype=np.int32)
        nodes.append(
            LiveNode(
                uid=chain[0].page + 1,
                parent=parent[0].page + 1 if parent else 0,
                tokens=len(chain) * page_size,
                num_pages=len(chain),
                pages=[block.page for block in chain[:MOST_NODE_PAGES]],
                locks=chain[0].ref_count,
                last_used=0,
                head=head[:HEAD].tolist(),
            )
        )
    return nodes


RECORDED_AFTER_LOOK = 2.0  # seconds after a look at the engine for which its steps are recorded
SHORTEST_SLICE = 0.02  # seconds; shorter steps are put together: more than fifty a second cannot be seen


class StepWatch:
    """A `StepObserver` that records steps while the live page is open."""

    def __init__(self, table: RunningTable) -> None:
        self.slices: deque[LiveSlice] = deque(maxlen=MOST_SLICES)
        self._table = table
        self._watched_until = 0.0
        self._steps = 0
        self._launched: dict[int, LiveSlice] = {}  # steps whose tokens have not arrived, by id of the batch
        self._last_end = 0.0
        self._previous: list[tuple[Request, int]] = []  # requests of the step before, with their preemptions so far
        self._seen: dict[int, Request] = {}  # requests of recent steps by uid

    def look(self) -> None:
        """Record steps for the next `RECORDED_AFTER_LOOK` seconds."""
        self._watched_until = time.perf_counter() + RECORDED_AFTER_LOOK

    def finished(self) -> list[Request]:
        """The last `MOST_FINISHED` requests that ended while steps were recorded, the last one last."""
        done = [request for request in self._seen.values() if request.state is RequestState.FINISHED]
        done.sort(key=lambda request: request.times.finished)
        for request in done[:-MOST_FINISHED]:
            del self._seen[request.uid]
        return done[-MOST_FINISHED:]

    def begin(self, phase: StepPhase, batch: Batch | None) -> None:
        """Note a launched step. One that fails before its tokens are waited for becomes no slice."""
        if phase == "launch" and batch is not None and time.perf_counter() <= self._watched_until:
            self._launched[id(batch)] = self._note(batch)
        elif phase == "fail":
            self._launched.pop(id(batch), None)

    def end(self, phase: StepPhase, batch: Batch | None) -> None:
        """Record a step whose tokens have arrived, or whose wait has failed."""
        if phase == "wait" and (step := self._launched.pop(id(batch), None)) is not None:
            self._record(step)

    def finish(self, requests: Sequence[Request]) -> None:
        """Do nothing: `finished` looks at the requests of recent steps."""

    def _note(self, batch: Batch) -> LiveSlice:
        requests = [self._table.request(slot) for slot in batch.slots.tolist()]
        fed = batch.q_lens.tolist()
        generating = batch.num_generating
        decode = sum(fed[:generating])  # drafts included
        rows = [
            (request.uid, 0, fed[row]) if row < generating else (request.uid, fed[row], 0)
            for row, request in enumerate(requests[:MOST_RUNNING])
        ]
        preempted = [request.uid for request, before in self._previous if request.preemptions > before]
        self._previous = [(request, request.preemptions) for request in requests]
        self._seen.update((request.uid, request) for request in requests)
        self._steps += 1
        return LiveSlice(
            number=self._steps,
            start=time.perf_counter(),
            end=0.0,
            steps=1,
            prefill=batch.num_tokens - decode,
            decode=decode,
            rows=rows,
            preempted=preempted,
        )

    def _record(self, step: LiveSlice) -> None:
        step.end = time.perf_counter()
        step.start = max(step.start, self._last_end)  # it was launched behind the one before
        self._last_end = step.end
        if self.slices and step.end - self.slices[-1].start < SHORTEST_SLICE:
            self.slices[-1] = _joined(self.slices[-1], step)
        else:
            self.slices.append(step)


def _joined(a: LiveSlice, b: LiveSlice) -> LiveSlice:
    """Two slices as one new object, because a watcher may still hold the old one."""
    rows = {uid: (prefill, decode) for uid, prefill, decode in a.rows}
    for uid, prefill, decode in b.rows:
        before = rows.get(uid, (0, 0))
        rows[uid] = (before[0] + prefill, before[1] + decode)
    return LiveSlice(
        number=a.number,
        start=a.start,
        end=b.end,
        steps=a.steps + b.steps,
        prefill=a.prefill + b.prefill,
        decode=a.decode + b.decode,
        rows=[(uid, *tokens) for uid, tokens in list(rows.items())[:MOST_RUNNING]],
        preempted=a.preempted + b.preempted,
    )


LONGEST_USER = 64  # characters of a client's name that are shown
_FREE, _CACHED, _PRIVATE = range(3)
_USES = ("free", "cached", "private")


class LiveView:
    """Looks at an engine without changing it; a `StepWatch` observes its steps. Call it in the engine's thread."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._started = time.perf_counter()
        self._steps = StepWatch(core.scheduler.table)
        core.loop.observers.append(self._steps)

    def look(self) -> LiveState:
        """The state now."""
        before = time.thread_time()
        self._steps.look()
        scheduler = self._core.scheduler
        memory = scheduler.memory
        nodes, num_nodes = nodes_of(memory.cache)
        pages = _Pages(memory, nodes)
        slots = scheduler.table.slots
        running = [self._running(slot, pages) for slot in slots[:MOST_RUNNING].tolist()]
        others = [*islice(scheduler.waiting, MOST_WAITING), *self._steps.finished()]
        stride = -(-memory.num_pages // MOST_CELLS)
        state = LiveState(
            started=self._started,
            time=time.perf_counter(),
            cache=self._core.config.prefix_cache,
            page_size=memory.page_size,
            num_pages=memory.num_pages,
            free=memory.pool.num_free,
            cached=memory.cache.num_pages,
            evictable=memory.cache.num_evictable,
            stride=stride,
            cells=pages.runs(stride),
            clock=max((node.last_used for node in nodes), default=0),
            nodes=nodes,
            num_nodes=num_nodes,
            requests=running + [_live_request(request) for request in others],
            num_running=len(slots),
            num_waiting=len(scheduler.waiting),
            slices=list(self._steps.slices),
            store={} if memory.offload is None else memory.offload.counts,
            drafts={} if scheduler.speculation is None else scheduler.speculation.counts,
            cost=0.0,
        )
        state.cost = time.thread_time() - before
        return state

    def _running(self, slot: int, pages: _Pages) -> LiveRequest:
        table = self._core.scheduler.table
        known = int(table.known_len[slot])
        row = self._core.scheduler.memory.row(slot)
        live = _live_request(table.request(slot))
        live.computed = int(table.kv_len[slot])
        live.generated = known - int(table.prompt_len[slot])
        live.pages = len(row)
        live.shared = int((pages.readers[row] > 1).sum())
        live.node = pages.last_node(row)
        live.tail = table.tokens[slot, max(known - HEAD, 0) : known].tolist()
        return live


class _Pages:
    """Every page's use, its number in a `PageRun`, and its node in the tree: arrays of [num_pages]."""

    def __init__(self, memory: KVMemory, nodes: list[LiveNode]) -> None:
        self.readers: Int32Array = np.zeros(memory.num_pages, dtype=np.int32)  # running requests with it in their rows
        owner = np.zeros(memory.num_pages, dtype=np.int64)
        for slot in memory.table.slots.tolist():
            row = memory.row(slot)
            self.readers[row] += 1
            owner[row] = memory.table.arrival[slot]
        self._use = np.where(memory.is_cached, _CACHED, _PRIVATE)
        self._use[memory.pool.is_free] = _FREE
        self._number: npt.NDArray[np.int64] = np.where(memory.is_cached, self.readers, owner)
        self._node: Int32Array = np.zeros(memory.num_pages, dtype=np.int32)
        for node in nodes:
            self._node[node.pages] = node.uid

    def last_node(self, row: Int32Array) -> int:
        """The last node that a request's row runs through; 0 is none."""
        nodes = self._node[row]
        found = np.flatnonzero(nodes)
        return int(nodes[found[-1]]) if len(found) else 0

    def runs(self, stride: int) -> list[PageRun]:
        """Every ``stride``-th page, equal neighbours put together."""
        use, number = self._use[::stride], self._number[::stride]
        first = np.flatnonzero((np.diff(use, prepend=-1) != 0) | (np.diff(number, prepend=0) != 0))
        counts = np.diff(first, append=len(use)).tolist()
        columns = zip(counts, use[first].tolist(), number[first].tolist(), strict=True)
        return [PageRun(count, _USES[kind], value) for count, kind, value in columns]


def _live_request(request: Request) -> LiveRequest:
    """A request without a row in the page table: it waits, or has finished."""
    times = request.times
    return LiveRequest(
        uid=request.uid,
        user=request.user[:LONGEST_USER].encode(errors="replace").decode(),  # lone surrogates become question marks
        state=request.state.value,
        prompt=request.prompt_len,
        cached=request.cached_tokens,
        computed=0,
        generated=len(request.output),
        room=request.max_len - request.prompt_len,
        pages=0,
        shared=0,
        node=0,
        preemptions=request.preemptions,
        accepted=request.accepted_drafts,
        rejected=request.rejected_drafts,
        arrived=times.arrived,
        admitted=times.admitted,
        first_token=times.first_token,
        finished=times.finished,
        reason="" if request.finish_reason is None else request.finish_reason.value,
        tail=request.output[-HEAD:] or request.prompt[-HEAD:].tolist(),
    )
