"""The engine in a thread of its own: messages come in, messages go out. It knows of no client and no event loop."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from minisgl.errors import ContextExceeded
from minisgl.generation import Generation
from minisgl.llm import LLM
from minisgl.outputs import Metrics
from minisgl.scheduler import StepOutput
from minisgl.server.live.state import Look
from minisgl.server.live.view import LiveView
from minisgl.server.messages import (
    Abort,
    Accepted,
    Conversation,
    EngineStats,
    Message,
    Prompt,
    Rejected,
    Reply,
    Submit,
    Told,
    Update,
)

logger = logging.getLogger(__name__)

_CHECK_INTERVAL = 0.5
"""Seconds between two looks at an idle engine."""


@dataclass(frozen=True, slots=True)
class _Choice:
    """An unfinished generation, and where its updates go."""

    job: int
    index: int
    generation: Generation


class EngineWorker:
    """Runs one `LLM`: nobody else touches it once `start` has been called.

    Args:
        llm: the engine.
        send: takes replies to whoever waits for them; called in the engine's thread, once a step.
        on_death: told the error if the engine's thread dies of one; called in that thread.
    """

    def __init__(
        self, llm: LLM, send: Callable[[Sequence[Reply]], None], on_death: Callable[[BaseException], None]
    ) -> None:
        self._llm = llm
        self._send = send
        self._on_death = on_death
        self._view = LiveView(llm)
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._jobs: dict[int, set[Generation]] = {}
        """What is unfinished of each job."""
        self._choices: dict[int, _Choice] = {}
        """Unfinished generations by the uid of their request."""
        self._thread = threading.Thread(target=self._run, name="minisgl-engine", daemon=True)

    def start(self) -> None:
        """Start the thread, once."""
        self._thread.start()

    def put(self, message: Message) -> None:
        """Leave a message for the engine, which reads it before its next step. Never blocks."""
        self._inbox.put(message)

    def stop(self, timeout: float) -> None:
        """End the thread after the step that it is in, and wait up to ``timeout`` seconds for that."""
        self._inbox.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            while self._read_inbox():
                updates = self._updates(self._llm.step())
                if updates:
                    self._send(updates)
        except BaseException as error:  # whatever it was, those who wait must hear of it
            logger.exception("the engine's thread died")
            self._on_death(error)

    def _read_inbox(self) -> bool:
        """Act on all messages, and sleep while there is nothing else to do. False when it is time to stop."""
        while not self._inbox.empty() or not self._llm.scheduler.has_work:
            message = self._next_message()
            if message is None:
                return False
            if isinstance(message, Submit):
                self._send([self._submit(message)])
            elif isinstance(message, Look):
                self._send([self._view.look()])
            elif isinstance(message, Abort):
                self._abort(message)
            else:
                self._send([Told(message.job, self._count())])
        return True

    def _count(self) -> EngineStats:
        scheduler = self._llm.scheduler
        memory = scheduler.memory
        free, cached = memory.pool.num_free, memory.cache.num_evictable
        return EngineStats(len(scheduler.waiting), len(scheduler.table), memory.num_pages, free, cached)

    def _next_message(self) -> Message | None:
        """Sleep until there is one, and look now and then whether the engine could still act on it."""
        while True:
            try:
                return self._inbox.get(timeout=_CHECK_INTERVAL)
            except queue.Empty:
                self._llm.check()

    def _submit(self, message: Submit) -> Accepted | Rejected:
        """Enqueue all generations of a job, or none of them."""
        generations: list[Generation] = []
        prompt_lens: list[int] = []
        try:
            for prompt in message.prompts:
                group = self._prepare(prompt, message)
                generations += group
                prompt_lens.append(group[0].request.prompt_len)
            for generation in generations:
                self._llm.submit(generation)
        except Exception as error:  # a malformed job, or a full queue, ends this job alone
            for generation in generations:
                self._llm.abort(generation)
            return Rejected(message.job, error)
        self._jobs[message.job] = set(generations)
        for number, generation in enumerate(generations):
            self._choices[generation.request.uid] = _Choice(message.job, number, generation)
        return Accepted(message.job, prompt_lens)

    def _prepare(self, prompt: Prompt, message: Submit) -> list[Generation]:
        if isinstance(prompt, Conversation):
            prompt = self._llm.tokenizer.encode_chat(prompt.messages, tools=prompt.tools)
        group = self._llm.prepare(prompt, message.params, message.streaming, message.user)
        self._check_fits(group[0])
        return group

    def _check_fits(self, generation: Generation) -> None:
        """Refuse at the edge what the KV cache could never finish, however idle the engine is."""
        request, memory = generation.request, self._llm.scheduler.memory
        capacity = memory.num_pages * memory.page_size
        if request.max_len - 1 <= capacity:  # the last token is never fed, so its KV needs no room
            return
        if request.prompt_len > capacity:
            raise ContextExceeded("prompt", f"{request.prompt_len} tokens do not fit the KV cache of {capacity} tokens")
        room = capacity + 1 - request.prompt_len
        raise ContextExceeded(
            "max_tokens",
            f"{request.max_len - request.prompt_len} with a prompt of {request.prompt_len} tokens exceed the KV cache "
            f"of {capacity} tokens; at most {room} fit",
        )

    def _abort(self, message: Abort) -> None:
        for generation in self._jobs.pop(message.job, ()):
            self._choices.pop(generation.request.uid, None)
            self._llm.abort(generation)

    def _updates(self, output: StepOutput) -> list[Reply]:
        """What a step brought for each generation that has news, in one update."""
        uids = [event.request.uid for event in output.events] + [request.uid for request in output.finished]
        updates: list[Reply] = []
        for uid in dict.fromkeys(uids):
            choice = self._choices[uid]
            update = _take_update(choice)
            if choice.generation.finished:
                self._forget(uid, choice)
            if update is not None:
                updates.append(update)
        return updates

    def _forget(self, uid: int, choice: _Choice) -> None:
        del self._choices[uid]
        unfinished = self._jobs[choice.job]
        unfinished.remove(choice.generation)
        if not unfinished:
            del self._jobs[choice.job]


def _take_update(choice: _Choice) -> Update | None:
    """The deltas that a streaming generation has made, or the whole of one that has finished."""
    generation = choice.generation
    queue_time = Metrics.of(generation.request).queue_time
    update = Update(choice.job, choice.index, cached_tokens=generation.request.cached_tokens, queue_time=queue_time)
    if generation.deltas:
        while generation.deltas:
            delta = generation.deltas.popleft()
            update.text += delta.text
            update.token_ids += delta.token_ids
            update.logprobs += delta.logprobs or []
            update.finish_reason, update.error = delta.finish_reason, delta.error
        return update
    if not generation.finished:
        return None
    whole = generation.completion()
    update.text, update.token_ids, update.logprobs = whole.text, list(whole.token_ids), list(whole.logprobs or [])
    update.finish_reason, update.error = whole.finish_reason, whole.error
    return update
