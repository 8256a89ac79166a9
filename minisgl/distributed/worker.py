"""A rank: ``python -m minisgl.distributed.worker``, started by `RankGroup` and by nobody else."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from pathlib import Path

import msgspec
import torch
import xxhash

from minisgl.child_process import BEAT_INTERVAL, Ready, beat, child_process
from minisgl.core.batch import StepResult
from minisgl.core.registry import resolve
from minisgl.distributed.communicator import choose_communicator, peers_of
from minisgl.distributed.control_plane import CONTROL_PLANES, StepReceiver
from minisgl.distributed.messages import EngineInfo, RankOptions, Stepped, decode_batch
from minisgl.distributed.rendezvous import join_group
from minisgl.distributed.reports import send_report
from minisgl.engine import Engine, PendingStep
from minisgl.engine.build import build_engine, rank_device


def main() -> None:
    """Build this rank's engine, then run steps until the driver closes the control plane or is gone."""
    with child_process(RankOptions) as (options, report):
        steps = resolve("control_plane", options.config.control_plane, CONTROL_PLANES).receiver(options.endpoint)
        engine = start(options)
        report(Ready(msgspec.to_builtins(info_of(engine))))
        with suppress(EOFError):
            Rank(engine, steps, options).run()


def start(options: RankOptions) -> Engine:
    """Meet the other ranks, and build the engine."""
    config = options.config
    device = rank_device(config, options.rank)
    torch.set_num_threads(options.threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    size, timeout = config.tensor_parallel_size, config.distributed_timeout
    group = join_group(options.store_port, options.rank, size, device, timeout)
    communicator = choose_communicator(config.all_reduce, device, timeout)(group, device)
    engine = build_engine(config, Path(options.path), communicator)
    if (peers := peers_of(communicator)) is not None:
        peers.finish()
    return engine


def info_of(engine: Engine) -> EngineInfo:
    """What the driver has to know of the engine."""
    return EngineInfo(
        num_pages=engine.num_pages,
        page_bytes=engine.page_bytes,
        model_bytes=engine.model_bytes,
        runner_bytes=engine.runner_bytes,
        max_seq_len=engine.max_seq_len,
        attention=engine.attention_choice,
    )


class Rank:
    """Launches steps as they come, and reports those that are complete.

    The next step is launched as soon as it is there, be the one before complete or not. The first rank reports for all;
    the others have the same tokens, and just go on. With ``verify_ranks`` they report as well. A rank whose sums were
    not complete ends, whichever it is: its part of what the first one samples from is nonsense.

    Args:
        engine: of this rank.
        steps: from the driver.
        options: of this rank.
    """

    def __init__(self, engine: Engine, steps: StepReceiver, options: RankOptions) -> None:
        self._engine = engine
        self._steps = steps
        self._options = options
        self._peers = peers_of(engine.communicator)
        self._pending: deque[tuple[int, bytes, PendingStep]] = deque()

    def run(self) -> None:
        """Until the control plane ends."""
        reports = self._options.rank == 0 or self._options.config.verify_ranks
        step = 0
        while True:
            beat()
            message = self._steps.receive(timeout=0.0 if self._pending else BEAT_INTERVAL)
            if message is not None:
                pending = self._engine.launch(decode_batch(message))
                if reports:
                    self._pending.append((step, message, pending))
                step += 1
            self._check()
            while self._pending and self._pending[0][2].done():
                self._report(*self._pending.popleft())

    def _check(self) -> None:
        if self._peers is not None:
            self._peers.check()

    def _report(self, step: int, message: bytes, pending: PendingStep) -> None:
        result = pending.wait()
        self._check()
        digest = digest_of(message, result) if self._options.config.verify_ranks else 0
        send_report(self._options.reports, Stepped(step, result.tokens.tobytes(), result.logprobs, digest))


def digest_of(message: bytes, result: StepResult) -> int:
    """64 bits that differ if ranks were told different things, or sampled different tokens."""
    return xxhash.xxh3_64_intdigest(message + result.tokens.tobytes())


if __name__ == "__main__":
    main()
