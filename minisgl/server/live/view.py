"""The engine's state as a message: built between two steps, in the engine's thread."""

from __future__ import annotations

import time
from itertools import islice

import numpy as np
import numpy.typing as npt

from minisgl.core.request import Int32Array, Request
from minisgl.engine_core import EngineCore
from minisgl.scheduler import KVMemory
from minisgl.server.live.state import (
    HEAD,
    MOST_CELLS,
    MOST_RUNNING,
    MOST_WAITING,
    LiveNode,
    LiveRequest,
    LiveState,
    PageRun,
)
from minisgl.server.live.steps import StepWatch
from minisgl.server.live.tree import nodes_of

LONGEST_USER = 64
"""Characters of a client's name that are shown. Half a surrogate pair in it becomes a question mark."""

_FREE, _CACHED, _PRIVATE = range(3)
_USES = ("free", "cached", "private")


class LiveView:
    """Looks at an engine and changes nothing. A `StepWatch` follows its steps.

    Args:
        core: the engine. Its steps run in the thread that calls `look`.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._started = time.perf_counter()
        self._steps = StepWatch(core.scheduler.table)
        core.loop.observers.append(self._steps)

    def look(self) -> LiveState:
        """The state now. Steps are recorded from the first look on, until none has come for a while."""
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
            requests=running + [_idle(request) for request in others],
            num_running=len(slots),
            num_waiting=len(scheduler.waiting),
            slices=list(self._steps.slices),
            cost=0.0,
        )
        state.cost = time.thread_time() - before
        return state

    def _running(self, slot: int, pages: _Pages) -> LiveRequest:
        table = self._core.scheduler.table
        known = int(table.known_len[slot])
        row = self._core.scheduler.memory.row(slot)
        return _described(
            table.request(slot),
            computed=int(table.kv_len[slot]),
            generated=known - int(table.prompt_len[slot]),
            pages=len(row),
            shared=int((pages.readers[row] > 1).sum()),
            node=pages.last_node(row),
            tail=table.tokens[slot, max(known - HEAD, 0) : known].tolist(),
        )


class _Pages:
    """What every page is for: its use, its number in a `PageRun`, and its node in the tree.

    Args:
        memory: whose pages.
        nodes: of its prefix cache. Their first pages must tell where they are.
    """

    def __init__(self, memory: KVMemory, nodes: list[LiveNode]) -> None:
        self.readers: Int32Array = np.zeros(memory.num_pages, dtype=np.int32)
        """[num_pages] int32 running requests that have the page in their rows."""
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
        """The last node that a request's row leads through; 0 is none."""
        nodes = self._node[row]
        found = np.flatnonzero(nodes)
        return int(nodes[found[-1]]) if len(found) else 0

    def runs(self, stride: int) -> list[PageRun]:
        """Every ``stride``-th page, neighbours that are alike put together."""
        use, number = self._use[::stride], self._number[::stride]
        first = np.flatnonzero((np.diff(use, prepend=-1) != 0) | (np.diff(number, prepend=0) != 0))
        counts = np.diff(first, append=len(use)).tolist()
        columns = zip(counts, use[first].tolist(), number[first].tolist(), strict=True)
        return [PageRun(count, _USES[kind], value) for count, kind, value in columns]


def _idle(request: Request) -> LiveRequest:
    """A request that has no row: it waits, or has finished."""
    tokens = request.output[-HEAD:] or request.prompt[-HEAD:].tolist()
    return _described(request, 0, len(request.output), 0, 0, 0, tokens)


def _described(
    request: Request, computed: int, generated: int, pages: int, shared: int, node: int, tail: list[int]
) -> LiveRequest:
    times = request.times
    return LiveRequest(
        uid=request.uid,
        user=request.user[:LONGEST_USER].encode(errors="replace").decode(),
        state=request.state.value,
        prompt=request.prompt_len,
        cached=request.cached_tokens,
        computed=computed,
        generated=generated,
        room=request.max_len - request.prompt_len,
        pages=pages,
        shared=shared,
        node=node,
        preemptions=request.preemptions,
        arrived=times.arrived,
        admitted=times.admitted,
        first_token=times.first_token,
        finished=times.finished,
        reason="" if request.finish_reason is None else request.finish_reason.value,
        tail=tail,
    )
