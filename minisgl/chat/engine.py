"""An engine in this process that answers."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing

from minisgl.chat.interrupt import Interrupt
from minisgl.chat.partner import Messages, NoAnswer
from minisgl.core.sampling_params import SamplingParams
from minisgl.llm import LLM


class EnginePartner:
    """An engine in this process.

    Args:
        model: as `LLM` takes it.
    """

    def __init__(self, model: str) -> None:
        self._llm = LLM(model)
        self.name = f"{model}, in this process"

    def answer(self, messages: Messages) -> Generator[str, None, str]:
        """See `Partner.answer`."""
        prompt = self._llm.tokenizer.encode_chat(messages)
        reason = None
        with Interrupt() as interrupt, closing(self._llm.stream(prompt, SamplingParams(max_tokens=None))) as deltas:
            for delta in deltas:
                interrupt.look()
                yield delta.text
                reason = delta.finish_reason
                if delta.error is not None:
                    raise NoAnswer(delta.error)
        return reason or ""
