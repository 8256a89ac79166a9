"""Models with random weights for a server under test, with a tokenizer whose every token is visible text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl.bench.shapes import SHAPES, model_dir

_TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": 512,
    "bos_token_id": None,
    "eos_token_id": 0,
}
_TINY_OPTIONS = {"num_pages": 4096, "max_seq_len": 4096}
"""A pool that a long run fills and evicts from, and rows that are no longer than they need to be."""
_MOST_TOKENS = 10_000
"""Ids of prompts for a model whose vocabulary is not known here; every one in use has more."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as a server takes it.

    Args:
        path: directory, or name.
        vocab_size: ids of prompts lie below this.
        options: of the engine that it needs.
    """

    path: str
    vocab_size: int
    options: dict[str, Any]


def served_model(name: str, root: Path) -> ServedModel:
    """The model of that name.

    Args:
        name: ``"tiny"`` or a shape of `SHAPES`, which are written under ``root`` and get random weights, or what
            ``python -m minisgl.serve --model`` takes.
        root: directory for what is written.
    """
    if name == "tiny":
        path = root / name
        path.mkdir()
        (path / "config.json").write_text(json.dumps(_TINY), encoding="utf-8")
        _write_tokenizer(path, _TINY["vocab_size"])
        return ServedModel(str(path), _TINY["vocab_size"], {"load_format": "dummy", **_TINY_OPTIONS})
    if name not in SHAPES:
        return ServedModel(name, _MOST_TOKENS, {})
    path = Path(model_dir(name, root))
    _write_tokenizer(path, json.loads((path / "config.json").read_text(encoding="utf-8"))["vocab_size"])
    return ServedModel(str(path), _MOST_TOKENS, {"load_format": "dummy"})


def _write_tokenizer(path: Path, vocab_size: int) -> None:
    """One word a token: whatever a model with random weights says, each of its tokens is a piece of a stream.

    The bytes of a usual tokenizer, drawn at random, are seldom whole characters, and a server holds back what is none.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {f"w{token}": token for token in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
