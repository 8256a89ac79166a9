"""``python -m minisgl.messages.tokenizer_worker``: a tokenizer's process."""

from __future__ import annotations

from pathlib import Path

import zmq

from minisgl.child_process import Ready, child_process
from minisgl.messages.jobs import Submit
from minisgl.messages.options import TokenizerOptions
from minisgl.messages.replies import Rejected
from minisgl.messages.sockets import JOBS, Receiver, Sender, address
from minisgl.messages.tokenize import TokenizerStage
from minisgl.tokenizer import Tokenizer


def main() -> None:
    """Tokenize jobs until the parent ends this process."""
    with child_process(TokenizerOptions) as (options, report):
        context, directory = zmq.Context(), Path(options.directory)
        inbox = Receiver[Submit](context, address(directory, options.name), Submit, JOBS)
        scheduler = Sender(context, address(directory, "scheduler"), JOBS)
        api = Sender(context, address(directory, "api"), JOBS)
        stage = TokenizerStage(Tokenizer(Path(options.model)), options.limit)
        report(Ready())
        while True:
            message = stage.tokenize(inbox.receive())
            if isinstance(message, Rejected):
                api.send([message])
            else:
                scheduler.send(message)


if __name__ == "__main__":
    main()
