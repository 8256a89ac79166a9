"""Answers of ``/generate``, in SGLang's shape: every chunk has the whole text so far."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from minisgl.messages import Update
from minisgl.server.formats import Format, Json, Usage


class GenerateFormat(Format):
    """Text, token ids and counts of each choice.

    Args:
        prompt_lens: tokens of each prompt.
        n: choices a prompt.
        several: whether the answer is a list.
    """

    def __init__(self, prompt_lens: Sequence[int], n: int, several: bool) -> None:
        self._id = uuid.uuid4().hex
        self._prompt_lens = prompt_lens
        self._n = n
        self._several = several
        self._so_far: dict[int, Update] = {}

    def whole(self, updates: Sequence[Update], usage: Usage) -> Json | list[Json]:
        """See `Format`, as for all that follow."""
        bodies = [self._body(update) for update in updates]
        return bodies if self._several else bodies[0]

    def opening(self, num_choices: int) -> list[Json]:
        """None."""
        return []

    def chunk(self, update: Update) -> Json | None:
        """The choice so far."""
        so_far = self._so_far.setdefault(update.choice, update)
        if so_far is not update:
            so_far.merge(update)
        if not update.text and not update.finish_reason:
            return None
        return {**self._body(so_far), "index": update.choice}

    def closing(self, usage: Usage) -> list[Json]:
        """None: every chunk counts its tokens."""
        return []

    def _body(self, update: Update) -> Json:
        reason: Json | None = None if update.finish_reason is None else {"type": update.finish_reason}
        if reason is not None and update.finish_reason == "length":
            reason["length"] = len(update.token_ids)
        meta = {
            "id": f"{self._id}-{update.choice}",
            "finish_reason": reason,
            "prompt_tokens": self._prompt_lens[update.choice // self._n],
            "completion_tokens": len(update.token_ids),
            "cached_tokens": update.cached_tokens,
        }
        return {"text": update.text, "output_ids": update.token_ids, "meta_info": meta}
