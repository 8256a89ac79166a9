"""``python -m minisgl.messages.detokenizer_worker``: the detokenizer's process."""

from __future__ import annotations

from pathlib import Path

import zmq

from minisgl.child_process import Ready, child_process
from minisgl.messages.detokenize import DetokenizerStage
from minisgl.messages.jobs import Stop
from minisgl.messages.options import DetokenizerOptions
from minisgl.messages.sockets import STEPS, UNBOUNDED, Receiver, Sender, address
from minisgl.messages.steps import Progress
from minisgl.tokenizer import Tokenizer


def main() -> None:
    """Detokenize until the parent ends this process."""
    with child_process(DetokenizerOptions) as (options, report):
        context, directory = zmq.Context(), Path(options.directory)
        inbox = Receiver[Progress](context, address(directory, options.name), Progress, STEPS)
        scheduler = Sender(context, address(directory, "scheduler"), UNBOUNDED)
        api = Sender(context, address(directory, "api"), STEPS)
        stage = DetokenizerStage(Tokenizer(Path(options.model)))
        report(Ready())
        while True:
            replies, stopped = stage.handle(inbox.receive())
            if stopped:
                scheduler.send(Stop(stopped))
            if replies:
                api.send(replies)


if __name__ == "__main__":
    main()
