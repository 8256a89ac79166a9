"""The offline API: prompts in, text out."""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import numpy as np
from tqdm.auto import tqdm

from minisgl.config import EngineConfig
from minisgl.context import AttentionChoice
from minisgl.core import EngineCore, Executor
from minisgl.engine.engine import Engine
from minisgl.errors import EngineDead, InvalidRequest, check_type
from minisgl.outputs import Completion, CompletionAssembler, Delta, RequestMetrics, RequestOutput
from minisgl.request import FinishReason, Request, TokenLogprobs
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.scheduler import StepOutput
from minisgl.tokenizer import Tokenizer
from minisgl.trace import Trace

PromptInput = str | Sequence[int]  # text or token ids
Messages = Sequence[Mapping[str, Any]]  # a conversation: each message has a role and a content


class LLM:
    """A model, ready to generate: an `EngineCore` with text at both ends. Not thread-safe.

    Args:
        model: ``"default"`` (SmolLM2-135M-Instruct), a directory with a checkpoint, or a Hugging Face hub id.
        executor: computes the steps; None builds the one that the options describe.
        **options: fields of `minisgl.config.EngineConfig`, where each is described with its unit and default.

    Raises:
        ConfigError: an option is unknown or cannot work here.
        ModelLoadError: the checkpoint cannot be found or used.
    """

    def __init__(self, model: str | Path = "default", *, executor: Executor | None = None, **options: Any) -> None:
        self.core = EngineCore(EngineConfig.from_options(str(model), options), executor)
        self.config = self.core.config
        self.tokenizer = self.core.tokenizer
        self.scheduler = self.core.scheduler
        self.loop = self.core.loop
        self.executor = self.core.executor
        self.model_config = self.executor.model_config
        self.max_seq_len = self.core.max_seq_len
        self._generations: dict[int, Generation] = {}

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Generate for all prompts, batched continuously, and return one output a prompt, in their order.

        A request that cannot be finished, such as a prompt larger than the KV cache, has ``finish_reason`` ``"error"``.

        Args:
            prompts: text, token ids, or a list of either or both.
            params: one for all, or one each; None is `SamplingParams` with its defaults.
            progress: show a progress bar with the throughput of prefill and decode.

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
        return [RequestOutput(group[0].request.prompt, [each.completion() for each in group]) for group in groups]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: bool = False,
    ) -> RequestOutput | list[RequestOutput]:
        """Answer one conversation, or a list of them, in the model's chat template; otherwise as `generate`."""
        is_list = isinstance(messages, Sequence) and len(messages) > 0 and not isinstance(messages[0], Mapping)
        conversations = cast(Sequence[Messages], messages if is_list else [messages])
        outputs = self.generate([self.tokenizer.encode_chat(each) for each in conversations], params, progress)
        return outputs if is_list else outputs[0]

    def stream(self, prompt: PromptInput, params: SamplingParams | None = None) -> Generator[Delta, None, None]:
        """Generate for one prompt and yield text as it comes. Closing the iterator aborts the request.

        Raises `InvalidRequest` for malformed input, `QueueFull` if too many requests are waiting.
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

    def _run(self, generations: Sequence[Generation], progress: bool) -> None:
        """Submit as the queue has room, and step until all are finished."""
        todo = deque(generations)
        unfinished = {generation.request.uid for generation in generations}
        try:
            with _ProgressBar(len(unfinished), progress) as bar:
                while unfinished:
                    while todo and self.scheduler.waiting.has_room:
                        self.submit(todo.popleft())
                    bar.begin_step()
                    output = self.step()
                    done = unfinished & {request.uid for request in output.finished}
                    unfinished -= done
                    bar.end_step(output, len(done))
        finally:
            for generation in generations:
                self.abort(generation)

    # -- one request at a time: prepare it, submit it, and step ---------------------------------------------------

    def prepare(
        self, prompt: PromptInput, params: SamplingParams, streaming: bool = False, user: str = ""
    ) -> list[Generation]:
        """Check a prompt and its parameters, and make its ``n`` generations; `InvalidRequest` names a wrong field."""
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        requests = self.core.input_processor.process(token_ids, params, streaming, user)
        return [Generation(request, self.tokenizer, index, streaming) for index, request in enumerate(requests)]

    def submit(self, generation: Generation) -> None:
        """Enqueue a prepared generation; `QueueFull` if too many are waiting."""
        self.core.add(generation.request)
        self._generations[generation.request.uid] = generation

    def step(self) -> StepOutput:
        """Run one step and hand its tokens to their generations.

        Raises `EngineDead` if a rank has ended; all requests have then ended with this error.
        """
        try:
            output = self.core.step()
        except EngineDead:
            self._deliver(self.core.take_output())
            raise
        self._deliver(output)
        return output

    def abort(self, generation: Generation) -> None:
        """End a generation early. One that has ended, or was never submitted, is left alone."""
        self.core.finish(generation.request.uid)
        self._deliver(self.core.take_output())
        if not self.scheduler.requests and self.core.has_work:  # a step in flight: an idle engine must hold nothing
            self.step()

    def _deliver(self, output: StepOutput) -> None:
        """Hand new tokens to their generations. Requests added to the scheduler directly have none."""
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

    # -- the engine behind it -------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine with its model, KV tensors and runner. `ConfigError` if there are several, in other processes."""
        return self.core.engine

    @property
    def attention_backend(self) -> AttentionChoice:
        """The attention backends of prefill and decode, and why these were chosen."""
        return self.executor.attention_choice

    def trace(self, limit: int | None = None) -> AbstractContextManager[Trace]:
        """Record every step inside a ``with`` block; ``limit`` is the most events to keep, the newest ones."""
        return self.core.trace(limit)

    def check(self) -> None:
        """Raise `EngineDead` if a rank has ended; an idle engine would not notice."""
        self.core.check()

    def close(self) -> None:
        """Free the device's memory and end the ranks' processes. Requests get an `EngineDead` after that.

        Also happens when the object is garbage-collected and when the program ends.
        """
        self.core.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Generation:
    """One of the ``n`` continuations of a prompt; decodes text step by step only for streaming and stop strings."""

    def __init__(self, request: Request, tokenizer: Tokenizer, index: int, streaming: bool) -> None:
        self.request = request
        self.finished = False
        self.deltas: deque[Delta] = deque()  # pieces that were not taken yet, if streaming
        self._streaming = streaming
        stop = tuple(request.params.stop)
        self._incremental = streaming or bool(stop)
        self._assembler = CompletionAssembler(tokenizer, index, stop, request.params.min_tokens)
        self._text = ""
        self._num_tokens = 0  # that `on_token` has taken
        self._length: int | None = None  # tokens up to a stop string; a step with drafts may bring more

    def on_token(self, token_id: int, logprobs: TokenLogprobs | None) -> bool:
        """Take a new token. Returns True if its text completes a stop string, so that the request must end."""
        if not self._incremental or self._assembler.ended:
            return False
        self._assembler.add([token_id], [logprobs] if logprobs else [])
        self._num_tokens += 1
        self._take()
        if self._assembler.ended:
            self._length = self._num_tokens
        return self._assembler.ended

    def on_finish(self) -> None:
        """Note that the request has ended, after its last token."""
        self.finished = True
        if self._incremental and not self._assembler.ended:
            self._end()

    def completion(self) -> Completion:
        """The whole answer of a finished request."""
        request = self.request
        if not self._assembler.ended:
            self._assembler.add(request.output)
            self._end()
        assert self._assembler.finish_reason is not None
        return Completion(
            token_ids=request.output[: self._length],
            text=self._text,
            finish_reason=self._assembler.finish_reason,
            error=request.error,
            cached_tokens=request.cached_tokens,
            logprobs=request.logprobs[: self._length] if request.params.logprobs is not None else None,
            metrics=RequestMetrics.of(request),
        )

    def _end(self) -> None:
        assert self.request.finish_reason is not None, "the request is not finished"
        self._assembler.finish(self.request.finish_reason.value, self.request.error)
        self._take()

    def _take(self) -> None:
        delta = self._assembler.take()
        self._text += delta.text
        if self._streaming:
            self.deltas.append(delta)


def _as_list(prompts: PromptInput | Sequence[PromptInput]) -> list[PromptInput]:
    """One text, or one list of token ids, is a list of one prompt."""
    is_single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], (int, np.integer)))
    return [cast(PromptInput, prompts)] if is_single else list(cast(Sequence[PromptInput], prompts))


class _ProgressBar:
    """Counts finished requests, and shows the throughput of the last step that did prefill or decode."""

    def __init__(self, total: int, visible: bool) -> None:
        layout = "{desc}: {n_fmt}/{total_fmt} |{bar:20}| {elapsed}{postfix}"
        self._bar = tqdm(total=total, disable=not visible, desc="requests", bar_format=layout)
        self._rates = {"prefill": "–", "decode": "–"}

    def __enter__(self) -> _ProgressBar:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def begin_step(self) -> None:
        self._start = time.perf_counter()

    def end_step(self, output: StepOutput, finished: int) -> None:
        elapsed = time.perf_counter() - self._start
        for kind, tokens in (("prefill", output.prefill_tokens), ("decode", output.decode_tokens)):
            if tokens:
                self._rates[kind] = f"{tokens / elapsed:.0f} tok/s"
        self._bar.set_postfix(self._rates, refresh=False)
        self._bar.update(finished)


# `help(LLM)` and editors show the options as keyword arguments, though they are written down in EngineConfig alone.
_executor = inspect.signature(LLM).parameters["executor"]
_options = inspect.signature(EngineConfig)
_positional = [_options.parameters["model"].replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)]
_keywords = [parameter for name, parameter in _options.parameters.items() if name != "model"]
LLM.__signature__ = _options.replace(parameters=[*_positional, _executor, *_keywords], return_annotation=LLM)  # type: ignore[attr-defined]
