"""A process that tokenizes: ``python -m minisgl.server.tokenizer_worker``."""

from __future__ import annotations

import logging
from pathlib import Path

import zmq

from minisgl.child_process import Ready, child_process
from minisgl.errors import Failure, MiniSGLError
from minisgl.logs import log_request
from minisgl.server.messages import (
    Conversation,
    PackedPrompt,
    Rejected,
    Submit,
    TokenIds,
    Tokenized,
    TokenizerOptions,
    pack,
)
from minisgl.server.sockets import JOBS, Receiver, Sender, address
from minisgl.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class TokenizerStage:
    """Tokenizes jobs one by one, and refuses texts that must have more than ``limit`` tokens, if known."""

    def __init__(self, tokenizer: Tokenizer, limit: int | None) -> None:
        self._tokenizer = tokenizer
        self._limit = limit

    def tokenize(self, job: Submit) -> Tokenized | Rejected:
        """Tokenize a job's texts. An error in them, or in the chat template, ends this job alone."""
        try:
            prompts = [self._token_ids(prompt) for prompt in job.prompts]
        except Exception as error:
            if not isinstance(error, MiniSGLError):
                logger.exception("job %d (%s) cannot be tokenized", job.job, job.request_id)
            return Rejected(job.job, Failure.of(error))
        return Tokenized(job.job, prompts, job.params, job.streaming, job.user, job.request_id)

    def _token_ids(self, prompt: PackedPrompt) -> bytes:
        if isinstance(prompt, TokenIds):
            return prompt.data
        if isinstance(prompt, Conversation):
            return pack(self._tokenizer.encode_chat(prompt.messages, tools=prompt.tools, limit=self._limit))
        return pack(self._tokenizer.encode(prompt, self._limit))


def main() -> None:
    """Tokenize jobs until the parent ends this process."""
    with child_process(TokenizerOptions) as (options, report):
        context, directory = zmq.Context(), Path(options.directory)
        inbox = Receiver[Submit](context, address(directory, options.name), Submit, JOBS)
        scheduler = Sender(context, address(directory, "scheduler"), JOBS)
        api = Sender(context, address(directory, "api"), JOBS)
        stage = TokenizerStage(Tokenizer(Path(options.model), options.allow_control_tokens), options.limit)
        report(Ready())
        while True:
            job = inbox.receive()
            message = stage.tokenize(job)
            log_request(logger, "tokenized", job.request_id, job=job.job)
            if isinstance(message, Rejected):
                api.send([message])
            else:
                scheduler.send(message)


if __name__ == "__main__":
    main()
