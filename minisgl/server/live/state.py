"""The answer to the live page's question: the engine's state. Plain data of bounded size.

Times are seconds of the engine's ``time.perf_counter``, to be compared with each other alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

import msgspec

from minisgl.errors import MiniSGLError

LIVE = "live"
"""What the engine is asked for."""


MOST_NODES = 200
MOST_RUNNING = 64
MOST_WAITING = 32
MOST_FINISHED = 24
MOST_CELLS = 4096
MOST_SLICES = 32
HEAD = 24
"""Tokens that a node of the tree shows, and a request."""
MOST_NODE_PAGES = 64


class LiveNode(msgspec.Struct):
    """A node of the radix tree, or a chain of blocks that the block hashes hold.

    Args:
        uid: names the node; the root is 0 and is not sent.
        parent: uid of the node above it.
        tokens: on the edge that leads to it.
        num_pages: that hold them.
        pages: the first `MOST_NODE_PAGES` of these.
        locks: of running requests, on prefixes that run through it; a node with none can be evicted.
        last_used: logical time of the last match or insert through it. Of hashed blocks, no time is known: 0.
        head: its first tokens.
        text: what they spell. Filled in where there is a tokenizer: the engine has none.
    """

    uid: int
    parent: int
    tokens: int
    num_pages: int
    pages: list[int]
    locks: int
    last_used: int
    head: list[int]
    text: str = ""


class LiveRequest(msgspec.Struct):
    """A request that runs, waits, or has just finished.

    Args:
        uid: the engine's number of it.
        user: as its client called itself.
        state: value of its `RequestState`.
        prompt: tokens of its prompt.
        cached: of these, how many the prefix cache had when it was admitted.
        computed: tokens whose KV is there, or is being computed.
        generated: new tokens that are known.
        room: most new tokens that it may have.
        pages: in its row of the page table.
        shared: of these, how many another running request reads as well.
        node: the last node of the tree that it reads; 0 is none.
        preemptions: how often it lost its pages.
        arrived, admitted, first_token, finished: when; 0 is not yet.
        reason: why it finished; empty while it has not.
        tail: its last tokens, generated ones if there are any.
        text: what they spell.
    """

    uid: int
    user: str
    state: str
    prompt: int
    cached: int
    computed: int
    generated: int
    room: int
    pages: int
    shared: int
    node: int
    preemptions: int
    arrived: float
    admitted: float
    first_token: float
    finished: float
    reason: str
    tail: list[int]
    text: str = ""


class PageRun(msgspec.Struct, frozen=True):
    """Neighbouring cells of the page map that are alike.

    Args:
        count: how many.
        use: ``free``, ``private`` or ``cached``.
        number: uid of the request that has them to itself, or how many running requests read them.
    """

    count: int
    use: str
    number: int


class LiveSlice(msgspec.Struct):
    """A step; or several in one, where they are shorter than the eye is quick.

    Args:
        number: of its first step, counted since somebody began to watch.
        start, end: from the launch, or the end of the step before, to the arrival of the tokens.
        steps: how many.
        prefill, decode: tokens fed.
        rows: (uid, prefill tokens, decode tokens) of at most `MOST_RUNNING` requests.
        preempted: uids of those that lost their pages to make room for it.
    """

    number: int
    start: float
    end: float
    steps: int
    prefill: int
    decode: int
    rows: list[tuple[int, int, int]]
    preempted: list[int]


class LiveState(msgspec.Struct):
    """The engine between two steps.

    Args:
        started: when this engine was; another engine has another one.
        time: now.
        cache: name of the prefix cache; ``nodes`` is empty for one whose insides are unknown here.
        page_size: tokens a page.
        num_pages: of the pool.
        free, cached, evictable: of these.
        stride: a cell of the map stands for the first one of so many pages; 1 unless there are more than `MOST_CELLS`.
        cells: the map.
        clock: logical time of the prefix cache's last use.
        nodes: at most `MOST_NODES`, the most recently used ones, parents before children.
        num_nodes: how many there are, as far as they were looked at.
        requests: running ones in order of arrival, then waiting ones, then finished ones; the first of each.
        num_running, num_waiting: how many there are.
        slices: the last `MOST_SLICES`; the last one may still grow.
        cost: seconds of processor time that the engine's thread took to make this.
    """

    started: float
    time: float
    cache: str
    page_size: int
    num_pages: int
    free: int
    cached: int
    evictable: int
    stride: int
    cells: list[PageRun]
    clock: int
    nodes: list[LiveNode]
    num_nodes: int
    requests: list[LiveRequest]
    num_running: int
    num_waiting: int
    slices: list[LiveSlice]
    cost: float


PERIOD = 0.1
"""Seconds between two looks at the engine, or more."""
SHARE = 0.05
"""Most of its time that the engine spends on being looked at."""


class LiveFeed:
    """Hands on the newest state. Belongs to one event loop.

    Args:
        ask: gets a state from the engine; a `MiniSGLError` that it raises goes to all who watch.
    """

    def __init__(self, ask: Callable[[], Awaitable[LiveState]]) -> None:
        self._ask = ask
        self._watchers = 0
        self._asking: asyncio.Task[None] | None = None
        self._state: LiveState | None = None
        self._error: MiniSGLError | None = None
        self._news = asyncio.Event()

    async def states(self) -> AsyncGenerator[LiveState, None]:
        """States as they come. Whoever is slow misses some, and then gets the newest.

        Raises:
            EngineDead: the engine died, or is shutting down.
        """
        seen = None
        self._enter()
        try:
            while self._error is None:
                if self._state is None or self._state is seen:
                    await self._news.wait()
                else:
                    seen = self._state
                    yield seen
            raise self._error
        finally:
            self._leave()

    def _enter(self) -> None:
        self._watchers += 1
        if self._asking is None:
            self._error = None
            self._asking = asyncio.create_task(self._keep_asking())

    def _leave(self) -> None:
        self._watchers -= 1
        if self._watchers == 0 and self._asking is not None:
            self._asking.cancel()
            self._asking = self._state = None

    async def _keep_asking(self) -> None:
        try:
            while True:
                self._state = await self._ask()
                self._tell()
                await asyncio.sleep(max(PERIOD, self._state.cost / SHARE))
        except MiniSGLError as error:
            self._error = error
            self._asking = self._state = None  # whoever comes next begins anew: the engine may have been restarted
            self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
