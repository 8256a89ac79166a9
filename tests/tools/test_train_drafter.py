"""Training a drafter: the loss falls, guesses become right, and prompts to measure with are new to the drafter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tools.drafter_head import Head, HeadConfig, save
from tools.drafter_prompts import held_out_prompts, training_prompts
from tools.train_drafter import (
    Text,
    accepted_lengths,
    frequent_tokens,
    mean_accepted,
    read,
    train,
    write,
)

VOCAB = 60


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """A random model whose next token depends on the last one most of all: its layers add little."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=VOCAB - 1,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    model.lm_head.weight.mul_(10.0)
    model.model.embed_tokens.weight.mul_(10.0)
    return model


def prompts(count: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB - 1, (count, 6), generator=generator).tolist()


def test_what_the_model_writes_is_its_own_greedy_answer(model: LlamaForCausalLM) -> None:
    texts = write(model, [*prompts(3, 1), [5, 6]], 12, 0.0, batch=4)
    assert len(texts) == 4
    for text in texts:
        logits = model(torch.tensor([text.tokens])).logits[0]
        assert logits[text.prompt_len - 1 : -1].argmax(-1).tolist() == text.tokens[text.prompt_len :]
    assert len({tuple(each.tokens) for each in write(model, [[5, 6]] * 8, 12, 1.0, batch=8)}) > 1


def test_a_guess_sees_nothing_that_comes_after_it(model: LlamaForCausalLM) -> None:
    """Step by step with what was known then, the head guesses what it guesses in one pass over the whole text."""
    torch.manual_seed(1)
    head = Head(model.config, HeadConfig(VOCAB, 24))
    texts = [Text(torch.randint(0, VOCAB, (12,)).tolist(), 2)]
    seen, table = read(model, texts), model.get_output_embeddings().weight
    with torch.no_grad():
        whole = head.unroll(seen.aux[:, :9], seen.embeds, table, 3)
        for length in (1, 4, 8):
            part = head.unroll(seen.aux[:, :length], seen.embeds[:, : length + 3], table, 3)
            for step in range(3):
                assert torch.allclose(part[step][0, -1], whole[step][0, length - 1], atol=1e-5)


def test_training_lowers_the_loss_and_more_guesses_are_right(model: LlamaForCausalLM) -> None:
    texts = write(model, prompts(96, 2), 24, 0.0, batch=96)
    unseen = write(model, prompts(24, 3), 24, 0.0, batch=24)
    tokens = frequent_tokens(texts, 48, VOCAB)
    assert tokens.tolist() == sorted(set(tokens.tolist()))
    torch.manual_seed(2)
    head = Head(model.config, HeadConfig(48, 48))
    head.initialise(model)
    before = mean_accepted(accepted_lengths(model, head, unseen, tokens, 3))
    losses = train(model, head, texts, tokens, progress=lambda done: done / 60, batch=32, steps=3, rate=5e-3)
    after = mean_accepted(accepted_lengths(model, head, unseen, tokens, 3))
    assert len(losses) == 60
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert after > before + 0.5


def test_what_is_measured_is_a_walk_along_the_text(model: LlamaForCausalLM) -> None:
    """A step that accepts n guesses moves n + 1 tokens ahead, and the last one ends with the text."""
    texts = write(model, prompts(6, 4), 20, 0.0, batch=6)
    head = Head(model.config, HeadConfig(VOCAB, 24))
    head.initialise(model)
    walks = accepted_lengths(model, head, texts, torch.arange(VOCAB), 3, batch=4)
    assert len(walks) == len(texts)
    for text, walk in zip(texts, walks, strict=True):
        answer = len(text.tokens) - text.prompt_len
        assert answer - 1 <= sum(walk) + len(walk) <= answer
        assert all(0 <= accepted <= 3 for accepted in walk)


def test_prompts_to_measure_with_are_about_other_subjects() -> None:
    training, held_out = training_prompts(10**6), held_out_prompts(10**6)
    assert len(training) > 3000
    assert len(held_out) > 500
    assert not set(training) & set(held_out)
    assert len(set(training)) == len(training)
    assert training_prompts(10) == training[:10]
    assert held_out_prompts(5, seed=1) != held_out[:5]


def test_the_checkpoint_is_small_and_in_the_public_format(model: LlamaForCausalLM, tmp_path: Path) -> None:
    from safetensors import safe_open

    head = Head(model.config, HeadConfig(48, 24))
    tokens = torch.arange(0, 48) + 7
    size = save(head, tokens, tmp_path)
    assert size < 100_000
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        assert torch.equal(file.get_tensor("d2t") + torch.arange(48), tokens)
        assert file.get_tensor("t2d").nonzero().flatten().tolist() == tokens.tolist()
        assert file.get_slice("midlayer.self_attn.q_proj.weight").get_shape() == [32, 64]
        assert file.get_slice("fc.weight").get_shape() == [32, 96]
        assert file.get_slice("fc.weight").get_dtype() == "BF16"
    assert {"norm.weight", "midlayer.hidden_norm.weight", "midlayer.mlp.down_proj.weight"} <= names
