"""``python -m minisgl.server.scheduler_worker``: the process that runs the engine."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path

import zmq

from minisgl.child_process import Ready, child_process
from minisgl.engine_core import EngineCore
from minisgl.messages.jobs import ToScheduler
from minisgl.messages.options import SchedulerOptions
from minisgl.messages.sockets import JOBS, STEPS, Receiver, Sender, address
from minisgl.server.engine_stage import EngineStage
from minisgl.server.recording import recording
from minisgl.server.views import views_of

PATIENCE = 0.5
"""Seconds for which an idle engine sleeps at most."""


def main() -> None:
    """Run the engine until the parent ends this process."""
    with child_process(SchedulerOptions) as (options, report):
        context, directory = zmq.Context(), Path(options.directory)
        inbox = Receiver[ToScheduler](context, address(directory, options.name), ToScheduler, JOBS)
        detokenizer = Sender(context, address(directory, "detokenizer"), STEPS)
        recorded = nullcontext if options.trace is None else partial(recording, path=options.trace)
        with EngineCore(options.engine) as core, recorded(core):
            stage = EngineStage(core, views_of(core))
            report(Ready({"max_seq_len": core.max_seq_len}))
            while True:
                for message in inbox.receive_all(0.0 if stage.has_work else PATIENCE):
                    stage.take(message)
                if not stage.has_work:
                    core.check()
                elif progress := stage.step():
                    detokenizer.send(progress)


if __name__ == "__main__":
    main()
