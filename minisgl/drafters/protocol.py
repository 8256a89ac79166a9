"""What a drafter is: it guesses the next tokens of running requests, and may be wrong about all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from minisgl.config import EngineConfig
from minisgl.errors import ConfigError
from minisgl.registry import Registry, resolve
from minisgl.request import Int32Array


@dataclass(frozen=True, slots=True)
class DraftRow:
    """One request that wants drafts."""

    uid: int  # of the request; never reused in an engine
    slot: int  # its row in the engine's token and page tables, until the request is preempted or ends
    tokens: Int32Array  # [length] prompt and verified output: a view, valid during the call
    count: int  # most tokens to draft, at least 1


class Drafter(Protocol):
    """Guesses what comes next. A bad guess costs time and never changes an answer, because the model verifies it.

    The class is called with a `DraftTarget`. Whatever it keeps of a request, it finds again by the ``uid``: between two
    calls the ``tokens`` of a request only grow. A drafter with a model keeps the KV of its own drafts as far as they
    turn out to be the beginning of the next ``tokens``.
    """

    def propose(self, rows: Sequence[DraftRow]) -> Sequence[Sequence[int] | Int32Array]:
        """Draft for each row up to ``count`` tokens that continue its ``tokens``; none where there is no good guess."""
        ...

    def finish(self, uid: int, prompt_len: int, tokens: Int32Array) -> None:
        """Forget a request that has ended, which may never have been seen; ``tokens`` are its prompt and output."""
        ...


@dataclass(frozen=True, slots=True)
class DraftTarget:
    """The engine that a drafter drafts for."""

    config: EngineConfig
    vocab_size: int
    hidden_size: int
    max_seq_len: int
    dtype: torch.dtype | None = None  # of the model; None if it runs in other processes
    # The `Engine`: its model with embedding and LM head, its runner and its KV tensors. None if it is another process.
    engine: Any | None = None

    def check_fits(
        self, vocab_size: int | None = None, hidden_size: int | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Raise `ConfigError`, which says what differs, if a drafter has another vocabulary, hidden size or dtype."""
        sizes = {"vocabulary": (vocab_size, self.vocab_size), "hidden size": (hidden_size, self.hidden_size)}
        for name, (of_drafter, of_model) in sizes.items():
            if of_drafter is not None and of_drafter != of_model:
                raise ConfigError(
                    f"drafter: {self.config.drafter!r} has a {name} of {of_drafter} and the model has one of "
                    f"{of_model}; use a drafter that was made for this model"
                )
        if dtype is not None and self.dtype is not None and dtype != self.dtype:
            of_drafter_name, of_model_name = (str(each).removeprefix("torch.") for each in (dtype, self.dtype))
            raise ConfigError(
                f"drafter: {self.config.drafter!r} computes in {of_drafter_name} and the model in {of_model_name}; "
                "convert the drafter, or set dtype"
            )


def hidden_layers(config: EngineConfig, num_layers: int) -> tuple[int, ...]:
    """Layers of a model with ``num_layers`` whose inputs its engine keeps for the drafter of ``config``.

    A drafter that reads some says which, in a static method of this name. The states of a token are in
    ``engine.hidden_states``, at the location of its KV, as soon as the step that fed it has been launched.
    """
    if config.drafter == "none" or config.tensor_parallel_size > 1:
        return ()
    of_drafter = getattr(resolve("drafter", config.drafter, DRAFTERS), "hidden_layers", None)
    return () if of_drafter is None else tuple(of_drafter(config, num_layers))


DRAFTERS: Registry[Callable[[DraftTarget], Drafter]] = {
    "eagle": "minisgl.drafters.eagle:EagleDrafter",
    "model": "minisgl.drafters.model:ModelDrafter",
    "ngram": "minisgl.drafters.ngram:NgramDrafter",
    "suffix": "minisgl.drafters.suffix:SuffixDrafter",
}
