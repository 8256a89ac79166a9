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
import json
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig, PreTrainedModel

from minisgl.bench.report import Report
from minisgl.models.hub import resolve_model
from tools.drafter_prompts import held_out_prompts, training_prompts

ROOT = Path(__file__).parent.parent
CHECKPOINT = ROOT / "minisgl" / "drafters" / "default"
RESULT = ROOT / "benchmarks" / "results" / "drafter.json"

# -- the head ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadConfig:
    """Sizes of a head; what is not here is the model's."""

    draft_vocab_size: int = 8192  # the tokens that it can guess: those that the model says most often
    intermediate_size: int = 768  # of its MLP; the default model's own is twice as wide


class RMSNorm(nn.RMSNorm):
    """A norm in the dtype of its input, which autocast does not see to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Head(nn.Module):
    """The head of EAGLE-3, for training: whole sequences, plain PyTorch. Parameters are named as in checkpoints.

    At position i it sees token i + 1 and the model's hidden states of position i, and guesses token i + 2.
    """

    def __init__(self, model: PretrainedConfig, config: HeadConfig) -> None:
        super().__init__()
        size = model.hidden_size
        self.config = config
        self.model_config = model
        self.num_heads, self.num_kv_heads = model.num_attention_heads, model.num_key_value_heads
        self.head_dim = getattr(model, "head_dim", None) or size // model.num_attention_heads
        self.eps = model.rms_norm_eps
        self.fc = nn.Linear(3 * size, size, bias=False)
        self.midlayer = nn.ModuleDict(
            {
                "input_layernorm": RMSNorm(size, self.eps),
                "hidden_norm": RMSNorm(size, self.eps),
                "self_attn": nn.ModuleDict(
                    {
                        "q_proj": nn.Linear(2 * size, self.num_heads * self.head_dim, bias=False),
                        "k_proj": nn.Linear(2 * size, self.num_kv_heads * self.head_dim, bias=False),
                        "v_proj": nn.Linear(2 * size, self.num_kv_heads * self.head_dim, bias=False),
                        "o_proj": nn.Linear(self.num_heads * self.head_dim, size, bias=False),
                    }
                ),
                "post_attention_layernorm": RMSNorm(size, self.eps),
                "mlp": nn.ModuleDict(
                    {
                        "gate_proj": nn.Linear(size, config.intermediate_size, bias=False),
                        "up_proj": nn.Linear(size, config.intermediate_size, bias=False),
                        "down_proj": nn.Linear(config.intermediate_size, size, bias=False),
                    }
                ),
            }
        )
        self.norm = RMSNorm(size, self.eps)
        theta = model.rope_parameters["rope_theta"]
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        self.register_buffer("inv_freq", theta**-exponents, persistent=False)

    def initialise(self, model: PreTrainedModel) -> None:
        """Start as a head that passes the last of the three hidden states on, which is not far from the final one."""
        with torch.no_grad():
            for projection in (self.midlayer["self_attn"]["o_proj"], self.midlayer["mlp"]["down_proj"]):
                projection.weight.normal_(std=0.002)
            size = len(self.fc.weight)
            self.fc.weight.normal_(std=0.002)
            self.fc.weight[:, -size:] += torch.eye(size, device=self.fc.weight.device)
            self.norm.weight.copy_(model.model.norm.weight)

    def unroll(self, aux: torch.Tensor, embeds: torch.Tensor, table: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """Logits of ``steps`` guesses in a row from every position: [B, L, draft_vocab_size] each.

        Step j at index i stands at position i + j: it has seen the model's hidden states up to position i, and its own
        output for the j positions behind. So its keys are those of step 0 up to index i, then one of each step since.

        Args:
            aux: [B, L, 3 × hidden_size] hidden states of the model.
            embeds: [B, L + steps, hidden_size] embeddings of the tokens.
            table: [draft_vocab_size, hidden_size] the rows of the model's LM head that the head can guess.
        """
        layer, length = self.midlayer, aux.shape[1]
        attn = layer["self_attn"]
        hidden = self.fc(aux)
        blocked = torch.ones(length, length, dtype=torch.bool, device=aux.device).triu(1)
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        logits: list[torch.Tensor] = []
        for step in range(steps):
            token = embeds[:, step + 1 : step + 1 + length]
            x = torch.cat([layer["input_layernorm"](token), layer["hidden_norm"](hidden)], dim=-1)
            q = self._rotate(self._split(attn["q_proj"](x), self.num_heads), step)
            keys.append(self._grouped(self._rotate(self._split(attn["k_proj"](x), self.num_kv_heads), step)))
            values.append(self._grouped(self._split(attn["v_proj"](x), self.num_kv_heads)))
            scores = (q @ keys[0].transpose(-1, -2)).float().masked_fill(blocked, -torch.inf)
            own = [(q * key).sum(-1, keepdim=True).float() for key in keys[1:]]
            weights = (torch.cat([scores, *own], dim=-1) * self.head_dim**-0.5).softmax(-1).to(x.dtype)
            attended = weights[..., :length] @ values[0]
            for index, value in enumerate(values[1:]):
                attended = attended + weights[..., length + index, None] * value
            hidden = hidden + attn["o_proj"](attended.transpose(1, 2).flatten(2))
            x, mlp = layer["post_attention_layernorm"](hidden), layer["mlp"]
            hidden = hidden + mlp["down_proj"](F.silu(mlp["gate_proj"](x)) * mlp["up_proj"](x))
            logits.append(self.norm(hidden) @ table.T)
        return logits

    def _split(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)

    def _grouped(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1)

    def _rotate(self, x: torch.Tensor, shift: int) -> torch.Tensor:
        positions = torch.arange(shift, shift + x.shape[2], device=x.device, dtype=torch.float32)
        angles = positions[:, None] * self.inv_freq
        cos, sin = (torch.cat([f(angles)] * 2, dim=-1).to(x.dtype) for f in (torch.cos, torch.sin))
        left, right = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-right, left], dim=-1) * sin


def hidden_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers whose inputs the head sees: an early one, the middle, and a late one, as EAGLE-3 chooses them."""
    return 2, num_layers // 2, num_layers - 3


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


# -- the checkpoint ----------------------------------------------------------------------------------------------------


def save(head: Head, tokens: torch.Tensor, directory: Path) -> int:
    """Write ``config.json`` and ``model.safetensors`` in bfloat16, and return the bytes of both."""
    model, layers = head.model_config, hidden_layers(head.model_config.num_hidden_layers)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": model.hidden_size,
        "intermediate_size": head.config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": head.num_heads,
        "num_key_value_heads": head.num_kv_heads,
        "head_dim": head.head_dim,
        "vocab_size": model.vocab_size,
        "draft_vocab_size": len(tokens),
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": head.eps,
        "rope_theta": model.rope_parameters["rope_theta"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        # Counted as the outputs of layers: one less than the layer whose input it is.
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers],
        },
    }
    tensors = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in head.state_dict().items()}
    ids = tokens.cpu()
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(model.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return sum((directory / name).stat().st_size for name in ("config.json", "model.safetensors"))


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
