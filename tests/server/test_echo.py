"""Prompts that come back, alone and with the log-probabilities of their tokens."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from minisgl import LLM
from tests.server.harness import PROMPT, RunningServer


def test_a_prompt_comes_back_before_its_continuation(server: RunningServer, reference: LLM) -> None:
    continued = server.complete(max_tokens=4).choices[0].text
    ids = reference.tokenizer.encode(PROMPT)
    for prompt in (PROMPT, ids):
        assert server.complete(prompt=prompt, max_tokens=4, echo=True).choices[0].text == PROMPT + continued
        chunks = list(server.complete(prompt=prompt, max_tokens=4, echo=True, stream=True))
        assert chunks[0].choices[0].text == PROMPT
        assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT + continued
    several = server.complete(prompt=[PROMPT, "the fox"], max_tokens=1, echo=True, n=2)
    assert [choice.text.startswith(PROMPT) for choice in several.choices] == [True, True, False, False]


def test_log_probabilities_of_a_prompt_are_those_of_transformers(server: RunningServer, reference: LLM) -> None:
    prompt = PROMPT * 6  # more tokens than are asked for at once
    ids = reference.tokenizer.encode(prompt)
    assert len(ids) > 65
    oracle = AutoModelForCausalLM.from_pretrained(server.model, dtype=torch.float32)
    with torch.no_grad():
        expected = oracle(torch.tensor([ids])).logits[0].log_softmax(-1)
    answer = server.complete(prompt=prompt, max_tokens=3, echo=True, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == len(ids) + 3
    assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == (None, None)
    wanted = [expected[place, token].item() for place, token in enumerate(ids[1:])]
    assert logprobs.token_logprobs[1 : len(ids)] == pytest.approx(wanted, abs=1e-4)
    for place, top in enumerate(logprobs.top_logprobs[1 : len(ids)]):
        assert max(top.values()) == pytest.approx(expected[place].max().item(), abs=1e-4)
    ends = [offset + len(token) for offset, token in zip(logprobs.text_offset, logprobs.tokens, strict=True)]
    assert logprobs.text_offset == [0, *ends[:-1]]
    assert answer.usage.completion_tokens == 3
    chunks = list(server.complete(prompt=prompt, max_tokens=3, echo=True, logprobs=2, stream=True))
    streamed = [value for chunk in chunks for value in chunk.choices[0].logprobs.token_logprobs]
    assert streamed == pytest.approx([None, *logprobs.token_logprobs[1:]], abs=1e-4)
    assert server.idle()
