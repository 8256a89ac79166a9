"""Train a drafter for the default model: an EAGLE-3 head, on text that the model itself writes (``make drafter``).

1. The model answers a few thousand prompts (`tools.drafter_prompts`), greedily and with temperature 1.
2. The head, one decoder layer, learns to guess what the model says next from the hidden states of three of its layers.
   As in EAGLE-3 (Li et al. 2025), it learns to go on from its own guesses too: from the second step on, its input is
   what it computed itself.
3. On prompts about other subjects we count how many guesses in a row are right, before and after the training.

``python -m tools.train_drafter --minutes 5`` takes that long on a GPU; without one, give it a night: ``--minutes 480``.
It needs PyTorch and transformers, and nothing of the engine's. The checkpoint has the public EAGLE-3 format, without
embedding and LM head, which are the model's own.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from minisgl.bench.report import Report
from minisgl.models.hub import resolve_model
from tools.drafter_head import Head, HeadConfig, hidden_layers, save
from tools.drafter_prompts import held_out_prompts, training_prompts

ROOT = Path(__file__).parent.parent
CHECKPOINT = ROOT / "minisgl" / "drafters" / "default"
RESULT = ROOT / "benchmarks" / "results" / "drafter.json"

# -- text that the model writes ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Text:
    """A prompt with the model's answer."""

    tokens: list[int]
    prompt_len: int


@torch.inference_mode()
def write(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    temperature: float,
    batch: int,
    until: float = math.inf,
) -> list[Text]:
    """Let the model answer ``prompts`` (token ids), ``batch`` at a time; begin no more at the time ``until``."""
    config = model.generation_config
    ends = set(config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id])
    pad = next(iter(ends)) or 0
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_p": 1.0, "top_k": 0}
    texts: list[Text] = []
    for begin in range(0, len(prompts), batch):
        if begin > 0 and time.monotonic() > until:
            break
        chosen = prompts[begin : begin + batch]
        longest = max(map(len, chosen))
        ids = torch.tensor([[pad] * (longest - len(each)) + list(each) for each in chosen], device=model.device)
        mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in chosen], device=model.device)
        written = model.generate(ids, attention_mask=mask, max_new_tokens=max_tokens, pad_token_id=pad, **sampling)[
            :, longest:
        ].tolist()
        for prompt, answer in zip(chosen, written, strict=True):
            length = next((index + 1 for index, token in enumerate(answer) if token in ends), len(answer))
            if length > 1:
                texts.append(Text([*prompt, *answer[:length]], len(prompt)))
    return texts


def frequent_tokens(texts: Sequence[Text], count: int, vocab_size: int) -> torch.Tensor:
    """Ids of the ``count`` tokens that answers have most often, ascending."""
    answers = torch.tensor([token for text in texts for token in text.tokens[text.prompt_len :]])
    counts = torch.bincount(answers, minlength=vocab_size)
    return counts.argsort(descending=True, stable=True)[:count].sort().values


# -- training ----------------------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """Texts side by side, and what the model thinks of them."""

    aux: torch.Tensor  # [B, L, 3 × hidden_size] inputs of three layers
    embeds: torch.Tensor  # [B, L, hidden_size] of the tokens
    logits: torch.Tensor  # [B, L, vocab_size] of the model
    answer: torch.Tensor  # bool[B, L] the positions of the answers' tokens, without prompt and padding


@torch.no_grad()
def read(model: PreTrainedModel, texts: Sequence[Text]) -> Batch:
    """Run the model over ``texts``."""
    length = max(len(text.tokens) for text in texts)
    ids = torch.tensor([text.tokens + [0] * (length - len(text.tokens)) for text in texts], device=model.device)
    positions = torch.arange(length, device=model.device)
    begins, ends = (
        torch.tensor(values, device=model.device)[:, None]
        for values in ([text.prompt_len for text in texts], [len(text.tokens) for text in texts])
    )
    out = model(ids, output_hidden_states=True, use_cache=False)
    layers = hidden_layers(model.config.num_hidden_layers)
    aux = torch.cat([out.hidden_states[layer] for layer in layers], dim=-1)
    answer = (positions >= begins) & (positions < ends)
    return Batch(aux, model.get_input_embeddings()(ids), out.logits, answer)


def loss_of(head: Head, batch: Batch, table: torch.Tensor, tokens: torch.Tensor, steps: int) -> torch.Tensor:
    """Cross-entropy between the model's distributions and the head's, over ``steps`` guesses; later ones count less.

    Guess j at index i is about the token at i + 2 + j, whose distribution the model has at i + 1 + j.
    """
    length = batch.aux.shape[1] - steps - 1
    with torch.no_grad():
        wanted = batch.logits.softmax(-1, dtype=torch.float32)[..., tokens]
    total = torch.zeros((), device=batch.aux.device)
    for step, logits in enumerate(head.unroll(batch.aux[:, :length], batch.embeds, table, steps)):
        first = step + 1
        counts = batch.answer[:, first + 1 : first + 1 + length]
        entropy = -(wanted[:, first : first + length] * logits.float().log_softmax(-1)).sum(-1)
        total = total + 0.8**step * entropy[counts].mean()
    return total / sum(0.8**step for step in range(steps))


def train(
    model: PreTrainedModel,
    head: Head,
    texts: Sequence[Text],
    tokens: torch.Tensor,
    *,
    progress: Callable[[int], float],
    batch: int,
    steps: int = 4,
    rate: float = 1e-3,
    seed: int = 0,
) -> list[float]:
    """Train, and return the losses. ``progress`` says after how many steps which share is done; at 1 we are."""
    generator = torch.Generator().manual_seed(seed)
    table = model.get_output_embeddings().weight[tokens].detach()
    optimiser = torch.optim.AdamW(head.parameters(), lr=rate, weight_decay=0.01, betas=(0.9, 0.95))
    mixed = torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda")
    losses: list[float] = []
    # Texts of similar length side by side, so that little is padding.
    ordered = sorted(texts, key=lambda text: len(text.tokens))
    groups = [ordered[begin : begin + batch] for begin in range(0, len(ordered), batch)]
    while True:
        for index in torch.randperm(len(groups), generator=generator).tolist():
            done = progress(len(losses))
            if done >= 1.0:
                return losses
            for group in optimiser.param_groups:
                warm = min(1.0, (len(losses) + 1) / 50)
                group["lr"] = rate * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))
            seen = read(model, groups[index])
            with mixed:
                loss = loss_of(head, seen, table, tokens, steps)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(head.parameters(), 1.0)
            optimiser.step()
            losses.append(float(loss.detach()))


# -- measuring ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def accepted_lengths(
    model: PreTrainedModel, head: Head, texts: Sequence[Text], tokens: torch.Tensor, count: int, batch: int = 8
) -> list[list[int]]:
    """For each text, how many of ``count`` guesses in a row are right in each step of an engine that drafts.

    The engine's first step samples the first token of the answer; each further one verifies the guesses behind what is
    known, keeps the right ones, and samples one token more. We walk along the texts in the same way.
    """
    table = model.get_output_embeddings().weight[tokens]
    walks: list[list[int]] = []
    for begin in range(0, len(texts), batch):
        chosen = texts[begin : begin + batch]
        seen = read(model, [Text(text.tokens + [0] * (count + 1), text.prompt_len) for text in chosen])
        length = seen.aux.shape[1] - count - 1
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
            guesses = [
                tokens[logits.argmax(-1)] for logits in head.unroll(seen.aux[:, :length], seen.embeds, table, count)
            ]
        for row, text in enumerate(chosen):
            guessed = torch.stack([each[row] for each in guesses], dim=1).tolist()
            walk, known = [], text.prompt_len + 1
            while known < len(text.tokens):
                following = text.tokens[known : known + count]
                right = 0
                while right < len(following) and guessed[known - 2][right] == following[right]:
                    right += 1
                walk.append(right)
                known += right + 1
            walks.append(walk)
    return walks


def mean_accepted(walks: Sequence[Sequence[int]]) -> float:
    """Guesses that are accepted, on average over the steps of all texts."""
    steps = [accepted for walk in walks for accepted in walk]
    return sum(steps) / max(len(steps), 1)


# -- all of it ---------------------------------------------------------------------------------------------------------


def run(name: str, minutes: float, output: Path, seed: int = 0, draft_tokens: int = 4) -> Report:
    """Write the texts, train, measure, and save the checkpoint in ``output``; return the measurements."""
    start = time.monotonic()
    torch.manual_seed(seed)
    path = resolve_model(name)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    tokenizer = AutoTokenizer.from_pretrained(path)
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device).eval().requires_grad_(False)

    def encoded(prompts: list[str]) -> list[list[int]]:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        return [
            tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
            for chat in chats
        ]

    # A few texts to measure on come first, so that there are some however short the time is.
    at_a_time, longest = (1024, 256) if on_gpu else (16, 192)
    unseen = encoded(held_out_prompts(128 if on_gpu else 16, seed))
    held_out = {
        "greedy": write(model, unseen, longest, 0.0, at_a_time),
        "temperature 1": write(model, unseen, longest, 1.0, at_a_time),
    }
    _tell(start, f"{sum(map(len, held_out.values()))} texts to measure on")
    prompts, texts, turn = encoded(training_prompts(1_000_000, seed)), [], 0
    writing_ends = start + 60 * minutes * 0.45
    while not texts or time.monotonic() < writing_ends:
        # Greedy answers once; sampled ones differ every time, so they are what the rest of the time is spent on.
        texts += write(model, prompts, longest, 0.0 if turn == 0 else 1.0, at_a_time, _part(writing_ends, turn == 0))
        _tell(start, f"{len(texts)} texts, {sum(len(text.tokens) - text.prompt_len for text in texts)} tokens")
        turn += 1

    config = HeadConfig(draft_vocab_size=min(HeadConfig.draft_vocab_size, model.config.vocab_size))
    tokens = frequent_tokens(texts, config.draft_vocab_size, model.config.vocab_size).to(device)
    head = Head(model.config, config).to(device)
    head.initialise(model)
    before = {kind: accepted_lengths(model, head, each, tokens, draft_tokens) for kind, each in held_out.items()}
    begin = time.monotonic()
    training_ends = max(start + 60 * minutes * 0.92 - 10, begin + 1)  # the rest is for measuring

    def progress(steps: int) -> float:
        done = (time.monotonic() - begin) / (training_ends - begin)
        if steps % 200 == 0:
            _tell(start, f"{steps} steps, {done:.0%} of the training")
        return done

    losses = train(model, head, texts, tokens, progress=progress, batch=24 if on_gpu else 4, seed=seed)
    _tell(start, f"loss {losses[0]:.3f} at the beginning, {losses[-1]:.3f} at the end")
    # What is shipped is measured, with its weights rounded to bfloat16.
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    size = save(head, tokens, output)
    after = {kind: accepted_lengths(model, head, each, tokens, draft_tokens) for kind, each in held_out.items()}

    written = sum(len(text.tokens) - text.prompt_len for text in texts)
    report = Report(
        "drafter",
        {
            "model": name,
            "minutes": minutes,
            "seed": seed,
            "num_draft_tokens": draft_tokens,
            "training_texts": len(texts),
            "training_tokens": written,
            "training_steps": len(losses),
            "held_out_texts": {kind: len(each) for kind, each in held_out.items()},
            "parameters": sum(parameter.numel() for parameter in head.parameters()),
            "checkpoint_bytes": size,
        },
    )
    columns = ("answers", "accepted a step, untrained", "accepted a step", "tokens a step", "first guess right")
    table = report.table(f"{name}: {draft_tokens} drafts a step on prompts that the drafter has not seen", *columns)
    for kind in held_out:
        steps = [accepted for walk in after[kind] for accepted in walk]
        first = sum(accepted > 0 for accepted in steps) / max(len(steps), 1)
        mean = mean_accepted(after[kind])
        table.add(kind, mean_accepted(before[kind]), mean, 1 + mean, first)
        report.samples[f"accepted a step of each text, {kind}"] = [
            mean_accepted([walk]) for walk in after[kind] if walk
        ]
    stride = max(1, len(losses) // 200)
    report.samples["loss"] = [
        sum(losses[begin : begin + stride]) / len(losses[begin : begin + stride])
        for begin in range(0, len(losses), stride)
    ]
    _tell(start, f"saved in {output}, {size / 1e6:.2f} MB")
    return report


def _part(end: float, half: bool) -> float:
    """When to stop: at ``end``, or halfway there."""
    now = time.monotonic()
    return now + (end - now) / 2 if half else end


def _tell(start: float, message: str) -> None:
    print(f"{time.monotonic() - start:6.0f} s  {message}", flush=True)


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="default", help="'default', or the directory of a Llama")
    parser.add_argument("--minutes", type=float, default=5.0, help="for everything")
    parser.add_argument("--output", type=Path, default=CHECKPOINT, help="directory of the checkpoint")
    parser.add_argument("--result", type=Path, default=RESULT, help="file for the measurements")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    report = run(options.model, options.minutes, options.output, options.seed)
    report.show(Console())
    report.write(options.result, f"python -m tools.train_drafter --minutes {options.minutes:g}", load)


if __name__ == "__main__":
    main()
