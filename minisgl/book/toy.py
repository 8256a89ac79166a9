"""The toy engine that a reader of the book writes, part by part: at most 200 lines of code.

``python -m minisgl.book.toy "What is the capital of France?"`` runs it on the default model, on the CPU.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, silu

from minisgl.models.hub import resolve_model
from minisgl.tokenizer import Tokenizer

# -- chapter 1: a loop over the model, and what it need not compute again


class Cache:
    """Keys and values of a row's first ``length`` tokens, one tensor for each layer."""

    def __init__(self) -> None:
        self.length, self.kept = 0, dict[int, tuple[Tensor, Tensor]]()

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Append the keys and values of new tokens, ``[new, kv_heads, head_dim]``; return those of all tokens."""
        if layer in self.kept:
            k, v = (torch.cat([old, new]) for old, new in zip(self.kept[layer], (k, v), strict=True))
        self.kept[layer] = k, v
        return k, v


def generate_naively(model: Model, prompt: list[int], count: int) -> list[int]:
    """Return the ``count`` likeliest tokens after ``prompt``; compute the whole text anew for each."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(tokens, [len(tokens)], [Cache()])[0].argmax()))
    return tokens[len(prompt) :]


def generate(model: Model, prompt: list[int], count: int) -> list[int]:
    """Return the same tokens; feed the prompt once, then only the token that was chosen last."""
    cache, fed, output = Cache(), prompt, list[int]()
    for _ in range(count):
        output.append(int(model(fed, [len(fed)], [cache])[0].argmax()))
        fed = output[-1:]
    return output


@dataclass(eq=False)
class Row:
    """A request: prompt and output in one list, of which the cache holds the beginning."""

    tokens: list[int]
    max_len: int  # tokens that it may have in all
    temperature: float = 0.0
    cache: Any = field(default_factory=Cache)


def flatten(rows: list[Row]) -> tuple[list[int], list[int]]:
    """Lay out a step: all rows' tokens that are not in their caches, one row after the other; and how many each has."""
    new = [row.tokens[row.cache.length :] for row in rows]
    return [token for tokens in new for token in tokens], [len(tokens) for tokens in new]


# -- chapter 2: the model


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """Divide each token's vector by its root mean square, then multiply element by element with ``weight``."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Turn each pair (i, i + d/2) of ``x[token, head, :]`` by the angle position × base^(−2i/d)."""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * base ** (-torch.arange(half) / half)
    (a, b), cos, sin = x.split(half, dim=-1), angles.cos(), angles.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of a row's last tokens, ``q[new, heads, d]``, to those up to their own, ``k, v[all, kv_heads, d]``."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
    future = torch.ones(len(q), len(k), dtype=torch.bool).triu(1 + len(k) - len(q))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(future, -torch.inf).softmax(-1), v)


class Model:
    """A Llama: its ``config.json``, and its weights by their names in the checkpoint."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        self.config, self.weights = config, weights

    @torch.inference_mode()
    def __call__(self, tokens: list[int], lengths: list[int], caches: list[Any]) -> Tensor:
        """Feed ``lengths[r]`` tokens to row r; return the logits after each row's last one, ``[rows, vocabulary]``."""
        w, base, d = self.weights, self.config["rope_parameters"]["rope_theta"], self.config["head_dim"]
        positions = torch.cat([cache.length + torch.arange(n) for cache, n in zip(caches, lengths, strict=True)])
        x = embedding(torch.tensor(tokens), w["model.embed_tokens.weight"])
        for layer in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            h = rms_norm(x, w[at + "input_layernorm.weight"])
            q, k, v = (linear(h, w[f"{at}self_attn.{name}_proj.weight"]).unflatten(1, (-1, d)) for name in "qkv")
            split = (each.split(lengths) for each in (rotate(q, positions, base), rotate(k, positions, base), v))
            rows = [attend(q, *cache.extend(layer, k, v)) for q, k, v, cache in zip(*split, caches, strict=True)]
            x = x + linear(torch.cat(rows).flatten(1), w[at + "self_attn.o_proj.weight"])
            h = rms_norm(x, w[at + "post_attention_layernorm.weight"])
            gate, up = (linear(h, w[f"{at}mlp.{name}_proj.weight"]) for name in ("gate", "up"))
            x = x + linear(silu(gate) * up, w[at + "mlp.down_proj.weight"])
        for cache, n in zip(caches, lengths, strict=True):
            cache.length += n
        x = rms_norm(x[torch.tensor(lengths).cumsum(0) - 1], w["model.norm.weight"])
        return linear(x, w["model.embed_tokens.weight"])


# -- chapter 3: its weights


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read bfloat16 tensors: 8 bytes with the header's length, the header in JSON, then the numbers themselves."""
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = {name: entry for name, entry in json.loads(data[8:start]).items() if name != "__metadata__"}
    numbers = torch.frombuffer(data, dtype=torch.bfloat16, offset=start)
    spans = {name: slice(*(byte // 2 for byte in entry["data_offsets"])) for name, entry in tensors.items()}
    return {name: numbers[spans[name]].view(entry["shape"]).float() for name, entry in tensors.items()}


# -- chapter 4: pages


class PagePool:
    """Memory for keys and values in equal pages, and how many readers each page has: a free page has none."""

    def __init__(self, config: dict[str, Any], num_pages: int, page_size: int = 16) -> None:
        shape = config["num_hidden_layers"], num_pages, page_size, config["num_key_value_heads"], config["head_dim"]
        self.kv = torch.zeros(2, *shape)
        self.page_size, self.free, self.readers = page_size, list(range(num_pages)), [0] * num_pages

    def take(self, count: int) -> list[int]:
        """Take ``count`` pages. Raises `MemoryError` if fewer are free, and then takes none."""
        if count > len(self.free):
            raise MemoryError(f"{count} pages wanted, {len(self.free)} free")
        return self.share([self.free.pop() for _ in range(count)])

    def share(self, pages: list[int]) -> list[int]:
        """Add a reader to each page."""
        for page in pages:
            self.readers[page] += 1
        return pages

    def give_back(self, pages: list[int]) -> None:
        """Take a reader from each page, and free those that have none left."""
        for page in pages:
            self.readers[page] -= 1
            if self.readers[page] == 0:
                self.free.append(page)


class PagedCache:
    """A row's cache in pages: position p lies in ``pages[p // page_size]``. It may begin with pages of another row."""

    def __init__(self, pool: PagePool, shared: list[int]) -> None:
        self.pool, self.pages, self.length = pool, pool.share(list(shared)), len(shared) * pool.page_size

    def reserve(self, length: int) -> None:
        """Take the pages that ``length`` tokens need beyond those that are there."""
        self.pages += self.pool.take(-(-length // self.pool.page_size) - len(self.pages))

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """As `Cache.extend`: write the new ones to their pages, and gather all of them from theirs."""
        length, size = self.length + len(k), self.pool.page_size
        positions = torch.arange(self.length, length)
        self.pool.kv[:, layer, torch.tensor(self.pages)[positions // size], positions % size] = torch.stack([k, v])
        return self.pool.kv[:, layer, self.pages].flatten(1, 2)[:, :length].unbind()


# -- chapter 5: a token from logits


def sample(logits: Tensor, temperature: float, generator: torch.Generator) -> int:
    """Draw a token from softmax(logits / temperature); at temperature 0, take the likeliest."""
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator))


# -- chapter 6: pages that earlier rows have left


class PrefixCache:
    """Full pages by all tokens from the beginning of a text to the page's end; the least recently used come first."""

    def __init__(self, pool: PagePool) -> None:
        self.pool, self.pages = pool, dict[tuple[int, ...], int]()

    def prefixes(self, tokens: list[int]) -> list[tuple[int, ...]]:
        """The beginnings of ``tokens`` that fill one page, two pages, and so on."""
        size = self.pool.page_size
        return [tuple(tokens[:end]) for end in range(size, len(tokens) + 1, size)]

    def match(self, tokens: list[int]) -> list[int]:
        """The pages of the longest beginning that is known."""
        known = list(takewhile(self.pages.__contains__, self.prefixes(tokens)))
        for prefix in reversed(known):  # the first page last: no page outlives those before it
            self.pages[prefix] = self.pages.pop(prefix)
        return [self.pages[prefix] for prefix in known]

    def insert(self, tokens: list[int], pages: list[int]) -> None:
        """Keep the pages that ``tokens`` fill, unless their tokens are known already."""
        for prefix, page in zip(self.prefixes(tokens), pages, strict=False):
            if prefix not in self.pages:
                self.pages[prefix] = self.pool.share([page])[0]
        self.match(tokens)

    def evict(self) -> bool:
        """Forget the least recently used page that no row reads. Return whether there was one."""
        for prefix, page in self.pages.items():
            if self.pool.readers[page] == 1:
                self.pool.give_back([self.pages.pop(prefix)])
                return True
        return False


# -- chapters 8 and 9: rows that come and go, and what happens when memory runs out


class Engine:
    """Continuous batching: each step admits rows, feeds all that run, samples a token for each, and lets rows go."""

    def __init__(self, model: Model, stop: set[int], num_pages: int = 256, max_rows: int = 8) -> None:
        self.model, self.stop, self.max_rows = model, stop, max_rows
        self.pool = PagePool(model.config, num_pages)
        self.prefixes = PrefixCache(self.pool)
        self.waiting, self.running = deque[Row](), list[Row]()
        self.generator = torch.Generator().manual_seed(0)

    def add(self, prompt: list[int], count: int, temperature: float = 0.0) -> Row:
        """Queue a request for at most ``count`` tokens. Raises `ValueError` if it could never have enough pages."""
        if not prompt or len(prompt) + count > len(self.pool.readers) * self.pool.page_size:
            raise ValueError(f"a prompt of {len(prompt)} tokens and {count} more do not fit: send a shorter one")
        self.waiting.append(Row(list(prompt), len(prompt) + count, temperature))
        return self.waiting[-1]

    def step(self) -> list[Row]:
        """Run the model once for all rows that have room. Return those that are finished."""
        self.grow()
        self.admit()
        logits = self.model(*flatten(self.running), [row.cache for row in self.running])
        for row, scores in zip(self.running, logits, strict=True):
            row.tokens.append(sample(scores, row.temperature, self.generator))
        finished = [row for row in self.running if row.tokens[-1] in self.stop or len(row.tokens) == row.max_len]
        for row in finished:
            self.leave(row)
        return finished

    def admit(self) -> None:
        """Let rows in while there are places and pages, in the order in which they came."""
        while self.waiting and len(self.running) < self.max_rows:
            row = self.waiting[0]
            row.cache = PagedCache(self.pool, self.prefixes.match(row.tokens[:-1]))
            if not self.make_room(row):
                return self.pool.give_back(row.cache.pages)
            self.running.append(self.waiting.popleft())

    def grow(self) -> None:
        """Give each running row the pages of its next step, the oldest first; if they run out, preempt the youngest."""
        for row in list(self.running):
            while row in self.running and not self.make_room(row):
                self.waiting.appendleft(self.running[-1])  # its tokens stay, its pages go
                self.leave(self.running[-1])

    def make_room(self, row: Row) -> bool:
        """Take the pages that a row's tokens need, also from the prefix cache. Return whether there are enough."""
        while True:
            try:
                row.cache.reserve(len(row.tokens))
            except MemoryError:
                if not self.prefixes.evict():
                    return False
            else:
                return True

    def leave(self, row: Row) -> None:
        """Stop running a row. Its full pages stay in the prefix cache."""
        self.running.remove(row)
        self.prefixes.insert(row.tokens[: row.cache.length], row.cache.pages)
        self.pool.give_back(row.cache.pages)


def load_default() -> tuple[Model, Tokenizer]:
    """The book's default model, and its tokenizer."""
    path = Path(resolve_model("default"))
    config = json.loads((path / "config.json").read_text())
    return Model(config, read_safetensors(path / "model.safetensors")), Tokenizer(path)


if __name__ == "__main__":
    model, tokenizer = load_default()
    engine = Engine(model, set(tokenizer.eos_ids))
    chats = [[{"role": "user", "content": question}] for question in sys.argv[1:]]
    rows = [engine.add(tokenizer.encode_chat(chat), 64) for chat in chats]
    while engine.waiting or engine.running:
        engine.step()
    for chat, row in zip(chats, rows, strict=True):
        print(tokenizer.decode(row.tokens[len(tokenizer.encode_chat(chat)) :]))
