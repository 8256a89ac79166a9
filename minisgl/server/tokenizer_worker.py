"""A process that tokenizes: ``python -m minisgl.server.tokenizer_worker``."""

from __future__ import annotations

import logging
from collections import deque
from pathlib import Path

import zmq

from minisgl.child_process import BEAT_INTERVAL, Ready, child_process
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


TURN = 2**16  # bytes of token ids after which the next job has its turn; no option: a job loses nothing by it
_PROMPT = 512  # bytes that a prompt counts for besides
_Job = tuple[Submit, list[bytes]]  # with the prompts that are done


class TokenizerStage:
    """Tokenizes jobs, and refuses texts that must have more than ``limit`` tokens, if known.

    Clients take turns, and so do the jobs of each client.
    """

    def __init__(self, tokenizer: Tokenizer, limit: int | None) -> None:
        self._tokenizer = tokenizer
        self._limit = limit
        self._clients: dict[str, deque[_Job]] = {}  # their jobs; the first of the first client has its turn

    @property
    def has_work(self) -> bool:
        """Whether there is a job that is not done."""
        return bool(self._clients)

    def take(self, job: Submit) -> None:
        """Put a job behind the others of its client."""
        self._clients.setdefault(job.client, deque()).append((job, []))

    def step(self) -> tuple[Submit, Tokenized | Rejected] | None:
        """Tokenize some texts of the first job. Return it once it is done; else it goes behind the others.

        An error in the texts, or in the chat template, ends this job alone.
        """
        client = next(iter(self._clients))
        jobs = self._clients.pop(client)
        job, done = jobs.popleft()
        message = self._turn(job, done)
        if message is None:
            jobs.append((job, done))
        if jobs:
            self._clients[client] = jobs
        return None if message is None else (job, message)

    def _turn(self, job: Submit, done: list[bytes]) -> Tokenized | Rejected | None:
        budget = TURN
        try:
            while len(done) < len(job.prompts) and budget > 0:
                done.append(self._token_ids(job.prompts[len(done)]))
                budget -= len(done[-1]) + _PROMPT
        except Exception as error:
            if not isinstance(error, MiniSGLError):
                logger.exception("job %d (%s) cannot be tokenized", job.job, job.request_id)
            return Rejected(job.job, Failure.of(error))
        if len(done) < len(job.prompts):
            return None
        return Tokenized(job.job, done, job.params, job.streaming, job.user, job.request_id, job.client)

    def _token_ids(self, prompt: PackedPrompt) -> bytes:
        if isinstance(prompt, TokenIds):
            return prompt.data
        if isinstance(prompt, Conversation):
            messages, tools, variables = prompt.messages, prompt.tools, prompt.variables
            return pack(self._tokenizer.encode_chat(messages, tools=tools, limit=self._limit, variables=variables))
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
            for job in inbox.receive_all(0.0 if stage.has_work else BEAT_INTERVAL):
                stage.take(job)
            if not stage.has_work or (outcome := stage.step()) is None:
                continue
            job, message = outcome
            log_request(logger, "tokenized", job.request_id, job=job.job)
            if isinstance(message, Rejected):
                api.send([message])
            else:
                scheduler.send(message)


if __name__ == "__main__":
    main()
