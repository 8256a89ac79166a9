from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl.core.sampling_params import SamplingParams
from minisgl.messages import Conversation, Rejected, Tokenized
from minisgl.messages.jobs import submit
from minisgl.messages.tokenize import TokenizerStage
from minisgl.tokenizer import Tokenizer
from tests.tokenizer.tiny import byte_level, save, tiny_tokenizer

USER = {"role": "user", "content": "the dog"}


def tokenize(*prompts: Any, tokenizer: Tokenizer | None = None, limit: int | None = None) -> Tokenized | Rejected:
    stage = TokenizerStage(tokenizer or tiny_tokenizer("byte-level"), limit)
    return stage.tokenize(submit(5, prompts, SamplingParams(stop="x"), True, "me"))


def test_all_kinds_of_prompts_become_token_ids() -> None:
    tokenizer = tiny_tokenizer("byte-level")
    message = tokenize("the dog", [5, 6], Conversation([USER]))
    assert isinstance(message, Tokenized)
    ids = [np.frombuffer(prompt, np.int32).tolist() for prompt in message.prompts]
    assert ids == [tokenizer.encode("the dog"), [5, 6], tokenizer.encode_chat([USER])]
    assert (message.job, message.params, message.streaming, message.user) == (5, {"stop": ("x",)}, True, "me")


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ("half a \ud800", "prompt"),
        (Conversation([]), "messages"),
        (Conversation([USER, {"role": "robot", "content": "x"}]), "messages[1].role"),
        (Conversation([{"role": "tool", "content": "the template refuses this"}]), "messages"),
    ],
)
def test_a_bad_prompt_ends_its_job_alone(prompt: Any, field: str) -> None:
    message = tokenize("the dog", prompt)
    assert isinstance(message, Rejected)
    assert (message.job, message.failure.kind, message.failure.field) == (5, "InvalidRequest", field)


@pytest.mark.parametrize("template", ["{% if %}", "{{ 1 / 0 }}", "{{ messages[99].content }}"])
def test_a_bad_template_ends_its_job_alone(tmp_path: Path, template: str) -> None:
    tokenizer = Tokenizer(save(byte_level(), tmp_path, template))
    message = tokenize(Conversation([USER]), tokenizer=tokenizer)
    assert isinstance(message, Rejected)
    assert message.failure.field == "messages"
    assert isinstance(tokenize("the dog", tokenizer=tokenizer), Tokenized)


def test_what_is_far_too_long_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer("byte-level")
    encoded: list[str] = []
    monkeypatch.setattr(tokenizer._backend, "encode", lambda text, **options: encoded.append(text) or [1])
    for prompt in ("x" * 10_000, Conversation([{"role": "user", "content": "x" * 10_000}])):
        message = tokenize(prompt, limit=100)
        assert isinstance(message, Rejected)
        assert "10" in message.failure.message
        assert "100 fit the context" in message.failure.message
    assert not encoded
    assert isinstance(tokenize("x" * 500, limit=100), Tokenized), "only what cannot fit is refused"
    assert len(encoded) == 1
