"""A server under test: started on a free port, watched from outside, and ended."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import httpx
import numpy as np
import psutil
from prometheus_client.parser import text_string_to_metric_families

from minisgl.bench.client import ServerAddress, address_of
from minisgl.bench.workloads import SHAPES, model_dir
from minisgl.errors import MiniSGLError

HOST = "127.0.0.1"
VOCAB_SIZE = 10_000  # of prompts, for a model whose vocabulary is not known here; every one in use has more
_TINY_OPTIONS = {"num_pages": 4096, "max_seq_len": 4096}  # a pool that a long run fills, and rows that are not too long
_STOP_TIMEOUT = 60.0
_POLL = 0.1
_PACKAGE = "minisgl."
_SAMPLE_PERIOD = 0.5  # seconds between two samples of memory
_SETTLE_TIMEOUT = 5.0  # seconds that a server has to forget the clients that left last
_TREND_SAMPLES = 20  # of the second half, for a trend to mean anything
_GAUGES = ("requests_running", "requests_waiting", "kv_pages", "kv_page_pool_size")  # names of the fields of `Gauges`


class ServerFailed(MiniSGLError):
    """The server to be measured does not start, does not answer, or does not end."""


class ServedModel(NamedTuple):
    """A model as a server takes it: directory or name, a bound of the ids of prompts, and the options that it needs."""

    path: str
    vocab_size: int
    options: dict[str, Any]


def served_model(name: str, root: Path) -> ServedModel:
    """A shape of `SHAPES`, written under ``root`` for random weights, or any model that the server takes.

    A shape's tokenizer has a word for each token, so that each random token is a piece of text in a stream. The bytes
    of a usual one, drawn at random, are seldom whole characters, and a server holds incomplete ones back.
    """
    if name not in SHAPES:
        return ServedModel(name, VOCAB_SIZE, {})
    from tokenizers import Tokenizer, models, pre_tokenizers

    path, vocab_size = Path(model_dir(name, root)), SHAPES[name]["vocab_size"]
    tokenizer = Tokenizer(models.WordLevel({f"w{token}": token for token in range(vocab_size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}', encoding="utf-8")
    options = {"load_format": "dummy"} | (_TINY_OPTIONS if name == "tiny" else {})
    return ServedModel(str(path), min(vocab_size, VOCAB_SIZE), options)


class RunningServer(NamedTuple):
    """A server that answers: its first process, its address, and the directory of its temporary files."""

    process: subprocess.Popen[bytes]
    address: ServerAddress
    directory: Path


@contextmanager
def server(model: ServedModel, options: Mapping[str, Any], root: Path, timeout: float) -> Iterator[RunningServer]:
    """``python -m minisgl.serve`` on a free port, while the block runs. It is ended afterwards, by force if need be.

    Call it in the main thread, which ends the server when it gets a SIGTERM itself. ``options`` are flags by names with
    underscores; ``root`` is for its log and its temporary files. Raises `ServerFailed`, with the end of the log, if it
    ends or has not answered after ``timeout`` seconds.
    """
    allow_many_sockets()
    directory, log = root / "tmp", root / "server.log"
    directory.mkdir(exist_ok=True)
    with socket.create_server((HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
    given = {"model": model.path, "host": HOST, "port": port, **model.options, **options}
    flags: list[str] = []
    for name, value in given.items():
        flags += [f"--{name.replace('_', '-')}", ",".join(map(str, value if isinstance(value, list) else [value]))]
    compiled = {"TORCHINDUCTOR_CACHE_DIR": f"{tempfile.gettempdir()}/torchinductor"}  # else below its TMPDIR

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)  # which ends the server too

    before = signal.signal(signal.SIGTERM, leave)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "minisgl.serve", *flags],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**compiled, **os.environ, "TMPDIR": str(directory)},
            process_group=0,  # Ctrl-C is for the client, which then ends the server
        )

    def failed(problem: str) -> ServerFailed:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
        return ServerFailed("\n".join([f"the server {problem}:", *lines]))

    def healthy() -> bool:
        if process.poll() is not None:
            raise failed(f"ended with exit code {process.returncode}")
        with contextlib.suppress(httpx.HTTPError):  # it does not listen yet
            return _get(HOST, port, "/health").status_code == 200
        return False

    try:
        if not poll(healthy, timeout):
            raise failed(f"did not answer within {timeout:g} s; raise --start-timeout")
        yield RunningServer(process, ServerAddress(HOST, port, model_of(HOST, port), model.vocab_size), directory)
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_TIMEOUT)
        process.kill()  # nothing, if it has ended
        process.wait()
        signal.signal(signal.SIGTERM, before)


@contextmanager
def running_server(
    url: str | None, model: str, options: Mapping[str, Any], vocab_size: int, start_timeout: float
) -> Iterator[tuple[ServerAddress, ProcessTree | None]]:
    """The server at ``url``, or one that is started: its address, and its processes if they are ours."""
    allow_many_sockets()
    if url is not None:
        host, port = address_of(url)
        yield ServerAddress(host, port, model_of(host, port), vocab_size), None
        return
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        with server(served_model(model, root), options, root, start_timeout) as running:
            yield running.address, ProcessTree(running.process.pid)


def model_of(host: str, port: int) -> str:
    """The name of the model that a server has; raises `ServerFailed` if it does not say."""
    try:
        name: str = _get(host, port, "/v1/models").json()["data"][0]["id"]
    except (httpx.HTTPError, ValueError, LookupError) as error:
        problem = f"http://{host}:{port}/v1/models does not name a model ({error!r}); is it OpenAI-compatible?"
        raise ServerFailed(problem) from error
    return name


def allow_many_sockets() -> None:
    """Raise this process's limit of open files as far as it may; the server inherits it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _get(host: str, port: int, path: str) -> httpx.Response:
    """A small page, on a connection of its own, which the server may not find open afterwards."""
    url = httpx.URL(scheme="http", host=host, port=port, path=path)
    return httpx.get(url, timeout=5.0, trust_env=False, verify=False)


def poll(condition: Callable[[], bool], timeout: float) -> bool:
    """Whether a condition has become true within ``timeout`` seconds."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(_POLL)
    return False


def kind_of(process: psutil.Process) -> str | None:
    """What a process is, by our module that it runs: ``minisgl.server.scheduler_worker`` is ``scheduler``; or None."""
    try:
        words: list[str] = process.cmdline()
    except psutil.Error:
        return None
    for flag, module in itertools.pairwise(words):
        if flag == "-m" and module.startswith(_PACKAGE):
            return module.removeprefix(_PACKAGE).removesuffix("worker").rstrip("._").rpartition(".")[2]
    return None


class ProcessTree:
    """A server's first process ``pid`` and all that it has started by now; ``kinds`` has those that run our modules."""

    def __init__(self, pid: int) -> None:
        root = psutil.Process(pid)
        found = (root, *root.children(recursive=True))
        self.kinds = {process: kind for process in found if (kind := kind_of(process)) is not None}

    def alive(self) -> list[psutil.Process]:
        """Those that still run; a zombie does not."""
        running: list[psutil.Process] = []
        for process in self.kinds:
            with contextlib.suppress(psutil.Error):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    running.append(process)
        return running

    def resident(self) -> dict[str, int]:
        """Bytes of memory by kind. Pages that processes share are counted for each."""
        return self._sum(lambda process: process.memory_info().rss)

    def descriptors(self) -> dict[str, int]:
        """Open files, sockets included, by kind."""
        return self._sum(lambda process: process.num_fds())

    def cpu_seconds(self) -> dict[str, float]:
        """Processor time by kind; the first process's main thread, where the event loop runs, apart from its others."""
        used: defaultdict[str, float] = defaultdict(float)
        for number, (process, kind) in enumerate(self.kinds.items()):
            with contextlib.suppress(psutil.Error):
                if number > 0:
                    times = process.cpu_times()
                    used[kind] += times.user + times.system
                    continue
                for thread in process.threads():
                    name = ", event loop" if thread.id == process.pid else ", other threads"
                    used[kind + name] += thread.user_time + thread.system_time
        return dict(used)

    def _sum(self, measure: Callable[[psutil.Process], int]) -> dict[str, int]:
        total: dict[str, int] = {}
        for process, kind in self.kinds.items():
            with contextlib.suppress(psutil.Error):  # it has ended, and has nothing any more
                total[kind] = total.get(kind, 0) + measure(process)
        return total


class Gauges(NamedTuple):
    """Requests of the engine, KV pages that belong to running requests (cached ones don't), and pages of the pool."""

    running: int
    waiting: int
    used_pages: int
    pages: int

    @property
    def idle(self) -> bool:
        return self.running == self.waiting == self.used_pages == 0


def parse_gauges(text: str) -> Gauges | None:
    """The gauges out of Prometheus' text format, None if one is missing."""
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    values = {sample.name: sample.value for sample in samples if sample.labels.get("state", "used") == "used"}
    with contextlib.suppress(KeyError):
        return Gauges(*(int(values[f"minisgl_{name}"]) for name in _GAUGES))
    return None


@dataclass(slots=True)
class ServerMonitor:
    """What a server holds before, during and after a load."""

    tree: ProcessTree  # its processes
    before: dict[str, int] = field(default_factory=dict)  # open files by kind of process, before the load
    after: dict[str, int] = field(default_factory=dict)  # and when it had settled afterwards
    gauges: Gauges | None = None  # at the end; None if the server shows none
    resident: list[dict[str, int]] = field(default_factory=list)  # bytes by kind of process, at equal distances in time

    @property
    def total(self) -> list[int]:
        """Bytes of all processes, for each sample."""
        return [sum(sample.values()) for sample in self.resident]

    @property
    def curve(self) -> list[float]:
        """Total MiB over time, in at most 100 points at equal distances."""
        return [round(value / 2**20, 1) for value in self.total[:: max(1, -(-len(self.resident) // 100))]]

    def growth(self, values: Sequence[int]) -> float | None:
        """Bytes by which memory grew over the second half of the load, by a straight line; None for too few samples."""
        late = values[len(values) // 2 :]
        if len(late) < _TREND_SAMPLES:
            return None
        slope, _ = np.polyfit(range(len(late)), late, deg=1)
        return float(slope) * (len(late) - 1)


@contextlib.asynccontextmanager
async def monitor_server(tree: ProcessTree, address: ServerAddress) -> AsyncIterator[ServerMonitor]:
    """Watch the server inside the block, and let it settle at its end."""
    monitor = ServerMonitor(tree, before=tree.descriptors())

    async def sample() -> None:
        while True:
            monitor.resident.append(tree.resident())
            await asyncio.sleep(_SAMPLE_PERIOD)

    sampling = asyncio.create_task(sample())
    try:
        yield monitor
    finally:
        sampling.cancel()

    def settled() -> bool:
        monitor.after = tree.descriptors()
        closed = sum(monitor.after.values()) <= sum(monitor.before.values())
        with contextlib.suppress(httpx.HTTPError):
            monitor.gauges = parse_gauges(_get(address.host, address.port, "/metrics").raise_for_status().text)
        return closed and (monitor.gauges is None or monitor.gauges.idle)

    await asyncio.to_thread(poll, settled, _SETTLE_TIMEOUT)
