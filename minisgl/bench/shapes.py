"""Model directories without weights, in the shapes of public checkpoints, for ``load_format="dummy"``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}

SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "Qwen3-14B": {
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_attention_heads": 40,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "Qwen3-32B": {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_attention_heads": 64,
        "num_hidden_layers": 64,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
}
"""By the name of the checkpoint whose config.json says so."""
FOR_ONE_GPU = ["Qwen3-0.6B", "Qwen3-14B"]
"""Those that one GPU serves well."""


def model_dir(name: str, root: Path) -> str:
    """The directory of a model: a shape of `SHAPES` is written under ``root``, anything else is returned as it is."""
    if name not in SHAPES:
        return name
    path = root / name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(_QWEN3 | SHAPES[name]), encoding="utf-8")
    return str(path)
