"""The offline API: prompts in, text out."""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
from tqdm.auto import tqdm

from minisgl.config import EngineConfig
from minisgl.context import AttentionChoice
from minisgl.core import EngineCore
from minisgl.engine.engine import Engine
from minisgl.errors import EngineDead, InvalidRequest, check_type
from minisgl.outputs import Delta, Generation, RequestOutput
from minisgl.request import FinishReason
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.scheduler import StepOutput
from minisgl.trace import Trace

_BAR = "{desc}: {n_fmt}/{total_fmt} |{bar:20}| {elapsed}{postfix}"

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    """A model, ready to generate: an `EngineCore`, with a tokenizer before it and the assembling of text behind it.

    Not for several threads at once; several instances may live side by side.

    Args:
        model: ``"default"`` (SmolLM2-135M-Instruct), a directory with a checkpoint, or a Hugging Face hub id.
        **options: fields of `minisgl.config.EngineConfig`, where each is described with its unit and default.

    Raises:
        ConfigError: an option is unknown or cannot work here.
        ModelLoadError: the checkpoint cannot be found or used.
    """

    def __init__(self, model: str | Path = "default", **options: Any) -> None:
        self.core = EngineCore(EngineConfig.from_options(str(model), options))
        self.config = self.core.config
        self.tokenizer = self.core.tokenizer
        self.scheduler = self.core.scheduler
        self.loop = self.core.loop
        self.executor = self.core.executor
        """Computes the steps, here or in the ranks' processes."""
        self.model_config = self.executor.model_config
        self.max_seq_len = self.core.max_seq_len
        self._generations: dict[int, Generation] = {}

    @property
    def engine(self) -> Engine:
        """The engine, with its model, KV memory and runner, to look into.

        Raises:
            ConfigError: there are several, in processes of their own.
        """
        return self.core.engine

    def close(self) -> None:
        """Give the memory of the device back, and end the processes of a tensor-parallel engine. Requests get an
        `EngineDead` after that.

        This also happens when the object is collected as garbage, and when the program ends."""
        self.core.close()

    def check(self) -> None:
        """See whether the engine still lives, which an idle one does not say by itself.

        Raises:
            EngineDead: a rank has ended.
        """
        self.core.check()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- what most callers use ---------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Generate for all prompts, batched continuously.

        Args:
            prompts: text, token ids, or a list of either or both.
            params: one for all, or one each; None is `SamplingParams` with its defaults.
            progress: show a progress bar with the throughput of prefill and decode.

        Returns:
            One output a prompt, in the order of the prompts. A request that the engine could not finish, such as a
            prompt larger than the whole KV cache, has ``finish_reason`` ``"error"``; the others are not affected.

        Raises:
            InvalidRequest: a prompt or its parameters are malformed. Nothing has been computed then.
            EngineDead: a rank has ended.
        """
        check_type("prompts", prompts, (Sequence, np.ndarray), "text, token ids, or a list of either")
        each_prompt = _as_list(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(each_prompt)
        check_type("params", params, Sequence, "SamplingParams or a list of them")
        if len(params) != len(each_prompt):
            message = f"{len(params)} for {len(each_prompt)} prompts; give one for all or one each"
            raise InvalidRequest("params", message)
        groups = [self.prepare(prompt, each) for prompt, each in zip(each_prompt, params, strict=True)]
        self._run([generation for group in groups for generation in group], progress)
        return [_output(group) for group in groups]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
    ) -> RequestOutput | list[RequestOutput]:
        """Answer one conversation, or a list of them, in the model's chat template.

        Args:
            messages: dicts with ``role`` and ``content``; or a list of such lists.
            params, progress: as in `generate`.

        Returns:
            One output for one conversation, a list for a list.
        """
        is_list = isinstance(messages, Sequence) and len(messages) > 0 and not isinstance(messages[0], Mapping)
        conversations = cast(Sequence[Sequence[Message]], messages if is_list else [messages])
        outputs = self.generate([self.tokenizer.encode_chat(each) for each in conversations], params, progress)
        return outputs if is_list else outputs[0]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Generator[Delta, None, None]:
        """Generate for one prompt and yield text as it comes. Closing the iterator aborts the request.

        Raises:
            InvalidRequest: the prompt or its parameters are malformed.
            QueueFull: too many requests are waiting.
        """
        return self._stream(self.prepare(prompt, params or SamplingParams(), streaming=True))

    def _stream(self, group: Sequence[Generation]) -> Generator[Delta, None, None]:
        try:
            for generation in group:
                self.submit(generation)
            while any(generation.deltas or not generation.finished for generation in group):
                for generation in group:
                    while generation.deltas:
                        yield generation.deltas.popleft()
                self.step()
        finally:
            for generation in group:
                self.abort(generation)

    # -- what the server and the curious use -------------------------------------------------------------------

    def prepare(
        self, prompt: Prompt, params: SamplingParams, streaming: bool = False, user: str = ""
    ) -> list[Generation]:
        """Check a prompt and its parameters, and make its ``n`` generations for a user. Nothing is allocated yet.

        Raises:
            InvalidRequest: naming the field and its limit.
        """
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        requests = self.core.input_processor.process(token_ids, params, streaming, user)
        return [Generation(request, self.tokenizer, index, streaming) for index, request in enumerate(requests)]

    def submit(self, generation: Generation) -> None:
        """Enqueue a prepared generation.

        Raises:
            QueueFull: too many requests are waiting.
        """
        self.core.add(generation.request)
        self._generations[generation.request.uid] = generation

    def abort(self, generation: Generation) -> None:
        """End a generation early; one that has ended, or was never submitted, is left alone.

        After the last request this waits for the step that may be in flight still: an idle engine holds nothing.
        """
        self.core.finish(generation.request.uid)
        self._deliver(self.core.take_output())
        if not self.scheduler.requests and self.core.has_work:
            self.step()

    def step(self) -> StepOutput:
        """Run one step of the engine and hand its tokens to their generations.

        Raises:
            EngineDead: a rank has ended. So have all requests, with this error.
        """
        try:
            output = self.core.step()
        except EngineDead:
            self._deliver(self.core.take_output())
            raise
        self._deliver(output)
        return output

    @property
    def attention_backend(self) -> AttentionChoice:
        """The attention backends of prefill and decode, often the same, and why it is these."""
        return self.executor.attention_choice

    @contextmanager
    def trace(self, limit: int | None = None) -> Iterator[Trace]:
        """Record every step inside the ``with`` block, see `EngineCore.trace`.

        Args:
            limit: most events to keep, the newest ones; None keeps all.
        """
        with self.core.trace(limit) as trace:
            yield trace

    def _deliver(self, output: StepOutput) -> None:
        """Pass on news. Requests that were added to the scheduler by hand have no generation to tell."""
        for event in output.events:
            generation = self._generations.get(event.request.uid)
            if generation is not None and generation.on_token(event.token_id, event.logprobs):
                self.core.finish(event.request.uid, FinishReason.STOP)
        # Stop strings that were just found have ended requests, too.
        output.finished += self.core.take_output().finished
        for request in output.finished:
            generation = self._generations.pop(request.uid, None)
            if generation is not None:
                generation.on_finish()

    def _run(self, generations: Sequence[Generation], progress: bool) -> None:
        """Submit as the queue has room, and step until all are finished."""
        todo = deque(generations)
        unfinished = {generation.request.uid for generation in generations}
        rates = {"prefill": "–", "decode": "–"}  # of the last step that did either
        try:
            with tqdm(total=len(unfinished), disable=not progress, desc="requests", bar_format=_BAR) as bar:
                while unfinished:
                    while todo and self.scheduler.waiting.has_room:
                        self.submit(todo.popleft())
                    start = time.perf_counter()
                    output = self.step()
                    elapsed = time.perf_counter() - start
                    for kind, tokens in (("prefill", output.prefill_tokens), ("decode", output.decode_tokens)):
                        if tokens:
                            rates[kind] = f"{tokens / elapsed:.0f} tok/s"
                    done = unfinished & {request.uid for request in output.finished}
                    unfinished -= done
                    bar.set_postfix(rates, refresh=False)
                    bar.update(len(done))
        finally:
            for generation in generations:
                self.abort(generation)


# `help(LLM)` and an editor's hints show the options themselves, which are written down in one place only.
_options = inspect.signature(EngineConfig)
_positional = [_options.parameters["model"].replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)]
_keywords = [parameter for name, parameter in _options.parameters.items() if name != "model"]
LLM.__signature__ = _options.replace(parameters=_positional + _keywords, return_annotation=LLM)  # type: ignore[attr-defined]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One text, or one list of token ids, is a list of one prompt."""
    is_single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], (int, np.integer)))
    return [cast(Prompt, prompts)] if is_single else list(cast(Sequence[Prompt], prompts))


def _output(group: Sequence[Generation]) -> RequestOutput:
    return RequestOutput(group[0].request.prompt, [generation.completion() for generation in group])
