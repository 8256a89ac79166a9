"""The engine's state as the live page shows it, plain data of bounded size, and the feed that fetches it.

Times are seconds of the engine's ``time.perf_counter``: compare them with each other only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

import msgspec

from minisgl.errors import MiniSGLError

LIVE = "live"  # the topic of a `StatsRequest` whose answer is a `LiveState`
MOST_NODES = 200
MOST_RUNNING = 64
MOST_WAITING = 32
MOST_FINISHED = 24
MOST_CELLS = 4096
MOST_SLICES = 32
HEAD = 24  # tokens shown of a tree node, and of a request
MOST_NODE_PAGES = 64


class LiveNode(msgspec.Struct):
    """A node of the radix tree, or a chain of blocks in the block-hash cache."""

    uid: int  # the root is 0 and is not sent
    parent: int  # uid of the node above it
    tokens: int  # on the edge that leads to it
    num_pages: int
    pages: list[int]  # the first `MOST_NODE_PAGES`
    locks: int  # running requests whose prefix runs through it; a node without any can be evicted
    last_used: int  # logical time of the last match or insert; 0 for hashed blocks, which have none
    head: list[int]  # its first tokens
    text: str = ""  # the same as text; filled in by the API process, because the engine has no tokenizer


class LiveRequest(msgspec.Struct):
    """A request that runs, waits, or has just finished."""

    uid: int
    user: str
    state: str  # value of its `RequestState`
    prompt: int  # tokens of its prompt
    cached: int  # of these, found in the prefix cache at admission
    computed: int  # tokens whose KV is there, or is being computed
    generated: int
    room: int  # most new tokens that it may have
    pages: int  # in its row of the page table
    shared: int  # of these, read by another running request as well
    node: int  # the last tree node that it reads; 0 is none
    preemptions: int
    accepted: int  # of its drafts so far
    rejected: int
    arrived: float  # these four: 0 until it has happened
    admitted: float
    first_token: float
    finished: float
    reason: str  # why it finished; empty until then
    tail: list[int]  # its last tokens, generated ones if there are any
    text: str = ""


class PageRun(msgspec.Struct, frozen=True):
    """Neighbouring cells of the page map that are alike."""

    count: int
    use: str  # "free", "private" or "cached"
    number: int  # private: uid of the request; cached: number of running requests that read the pages


class LiveSlice(msgspec.Struct):
    """One step, or several short ones put together."""

    number: int  # of its first step, counted since the page was opened
    start: float  # launch, or end of the step before
    end: float  # arrival of the tokens
    steps: int
    prefill: int  # tokens fed
    decode: int
    rows: list[tuple[int, int, int]]  # (uid, prefill tokens, decode tokens) of at most `MOST_RUNNING` requests
    preempted: list[int]  # uids of requests that lost their pages to make room for it


class LiveState(msgspec.Struct):
    """The engine between two steps."""

    started: float  # tells engines apart: a restarted one has another time
    time: float
    cache: str  # name of the prefix cache; ``nodes`` is empty for kinds that are unknown here
    page_size: int
    num_pages: int
    free: int
    cached: int
    evictable: int
    stride: int  # pages for each cell of the map; more than 1 only above `MOST_CELLS` pages
    cells: list[PageRun]
    clock: int  # logical time of the prefix cache's last use
    nodes: list[LiveNode]  # at most `MOST_NODES`, the most recently used ones, parents before children
    num_nodes: int
    requests: list[LiveRequest]  # running ones by arrival, then waiting ones, then finished ones
    num_running: int
    num_waiting: int
    slices: list[LiveSlice]  # the last `MOST_SLICES`; the last one may still grow
    store: dict[str, int]  # `PageOffloader.counts`; empty without a page store
    drafts: dict[str, int]  # drafted and accepted since the engine started, paused now; empty without a drafter
    cost: float  # processor seconds of the engine's thread to make this


PERIOD = 0.1  # least seconds between two looks at the engine
SHARE = 0.05  # largest share of its time that the engine spends on answering them


class LiveFeed:
    """Fetches states while at least one watcher wants them, and gives each watcher the newest. One event loop only.

    ``ask`` gets a state from the engine; a `MiniSGLError` that it raises goes to all watchers.
    """

    def __init__(self, ask: Callable[[], Awaitable[LiveState]]) -> None:
        self._ask = ask
        self._watchers = 0
        self._asking: asyncio.Task[None] | None = None
        self._state: LiveState | None = None
        self._error: MiniSGLError | None = None
        self._news = asyncio.Event()

    async def states(self) -> AsyncGenerator[LiveState, None]:
        """Yield states as they come; a slow watcher skips to the newest. Raises `EngineDead`."""
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
                self._notify()
                await asyncio.sleep(max(PERIOD, self._state.cost / SHARE))
        except MiniSGLError as error:
            self._error = error
            self._asking = self._state = None  # the next watcher begins anew: the engine may have been restarted
            self._notify()

    def _notify(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
