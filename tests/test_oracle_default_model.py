"""The oracle with real weights: SmolLM2 answers ten chat prompts as transformers does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams

MAX_NEW_TOKENS = 24
QUESTIONS = [
    "What is the capital of France? Answer briefly.",
    "Name three colours.",
    "Write one sentence about the sea.",
    "What is 2 + 2?",
    "Translate 'good morning' to Spanish.",
    "Who wrote Hamlet?",
    "List two animals that can fly.",
    "Why is the sky blue? One sentence.",
    "Give me a word that rhymes with 'cat'.",
    "Say hello to my friend Ada.",
]


@pytest.fixture(scope="module")
def reference(default_model_dir: Path) -> list[tuple[list[int], str]]:
    """Token ids of each prompt and the text that transformers generates, one prompt at a time."""
    tokenizer = AutoTokenizer.from_pretrained(default_model_dir, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=torch.float32, local_files_only=True)
    answers = []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
        generated = model.generate(ids, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
        answers.append((ids[0].tolist(), tokenizer.decode(generated[0, ids.shape[1] :], skip_special_tokens=True)))
    return answers


def test_greedy_chat_answers_equal_those_of_transformers(
    default_model_dir: Path, reference: list[tuple[list[int], str]]
) -> None:
    llm = LLM(str(default_model_dir), dtype="float32", device="cpu", num_pages=128)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_NEW_TOKENS)
    outputs = llm.chat([[{"role": "user", "content": question}] for question in QUESTIONS], params)
    assert isinstance(outputs, list)
    assert [output.prompt_token_ids for output in outputs] == [ids for ids, _ in reference]
    assert [output.text for output in outputs] == [text for _, text in reference]
    assert "Paris" in outputs[0].text
    assert any(output.cached_tokens > 0 for output in outputs), "the system prompt is shared"
    assert {output.finish_reason for output in outputs} == {"stop", "length"}
