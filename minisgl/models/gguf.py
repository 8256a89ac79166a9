"""GGUF files, llama.cpp's format: converted to a model directory, once, in which Q4_0, Q4_1 and Q8_0 stay quantised.

A group is 32 weights of a row. Q4_0 has a scale d for each, and numbers q that mean ``d (q − 8)``; Q4_1 has a minimum m
too, ``d q + m``; Q8_0 has signed bytes. Weights of other types become bfloat16.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save_file

from minisgl.errors import ModelLoadError

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

GROUP_SIZE = 32
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
VERSION = 2
"""Of what `convert_gguf` writes. Raise it when that changes, so that old results in the cache are not used."""
_FAMILIES = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}  # type → bits
# Fields of rope.scaling, and of others the values that change nothing.
_ROPE_FIELDS = {"type", "factor", "original_context_length", "finetuned", "yarn_beta_fast", "yarn_beta_slow"}
_ROPE_NEUTRAL = {"attn_factor": 1.0, "yarn_attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0}
# Projections that we merge must be quantised alike.
_MERGED = (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), ("mlp.gate_proj", "mlp.up_proj"))
_SINGLE = (("self_attn.o_proj",), ("mlp.down_proj",))


def convert_gguf(file: Path, target: Path) -> None:
    """Write config and weights of ``file`` into the directory ``target``; the tokenizer is another matter.

    Raises `ModelLoadError` if the file is damaged, or its architecture is not supported.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
        named = str(reader.fields["general.architecture"].contents())
    except (ValueError, KeyError, OSError, IndexError) as error:
        raise ModelLoadError(f"{file}: truncated or corrupt ({error}); download it again") from error
    if named not in _ARCHITECTURES:
        raise ModelLoadError(
            f"{file}: architecture {named!r} is not supported in GGUF; choose from {', '.join(_ARCHITECTURES)}"
        )
    config = _config(file, reader, named)
    weights = _by_hf_name(file, reader, named, config["num_hidden_layers"])
    quantized, bits, zero_points = _choose(weights, config["num_hidden_layers"])
    if quantized:
        # Everything else that is a projection is kept as floats.
        projections = {name.removesuffix(".weight") for name in weights if name.endswith("_proj.weight")}
        config["quantization_config"] = {
            "quant_method": "gguf",
            "bits": bits,
            "group_size": GROUP_SIZE,
            "zero_point": zero_points,
            "modules_to_not_convert": sorted(projections - quantized),
        }
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        rows = _row_order(named, name, config, int(tensor.shape[-1]) if len(tensor.shape) > 1 else int(tensor.shape[0]))
        if name.removesuffix(".weight") in quantized:
            parts = _unpack(tensor, zero_points)
        else:
            parts = {"weight": _floats(tensor).to(torch.bfloat16)}
        for end, part in parts.items():
            ordered = part if rows is None else part[torch.from_numpy(rows)]
            tensors[f"{name.removesuffix('weight')}{end}" if name.endswith("weight") else name] = ordered.contiguous()
    target.mkdir(parents=True, exist_ok=True)
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(config, indent=2))


def _config(file: Path, reader: GGUFReader, named: str) -> dict[str, Any]:
    from transformers import AutoConfig

    # transformers reads most sizes and the base of the frequencies, but no scaling of them.
    config: dict[str, Any] = AutoConfig.from_pretrained(file.parent, gguf_file=file.name).to_dict()
    start = f"{named}."
    fields = {
        name.removeprefix(start): field.contents() for name, field in reader.fields.items() if name.startswith(start)
    }
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    config |= {"architectures": [_ARCHITECTURES[named]], "tie_word_embeddings": tied, "dtype": "bfloat16"}
    head_dim = fields.get("attention.key_length", config["hidden_size"] // config["num_attention_heads"])
    for name in ("attention.value_length", "rope.dimension_count"):
        if fields.get(name, head_dim) != head_dim:
            raise ModelLoadError(
                f"{file}: {name} {fields[name]} is not supported, only {head_dim}, the width of a head's keys"
            )
    config["head_dim"] = head_dim
    config["rope_parameters"] = {**config["rope_parameters"], **_rope_scaling(file, reader, fields, config)}
    return config


def _rope_scaling(
    file: Path, reader: GGUFReader, fields: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Fields of ``rope_parameters``, by the rules of llama.cpp; the scaling of Llama 3 is a tensor of factors."""
    scaling = {
        name.removeprefix("rope.scaling."): each for name, each in fields.items() if name.startswith("rope.scaling.")
    }
    for name, value in scaling.items():
        if name not in _ROPE_FIELDS and value != _ROPE_NEUTRAL.get(name):
            raise ModelLoadError(f"{file}: rope.scaling.{name} {value!r} is not supported; choose a file without it")
    rope_type = scaling.get("type", "linear")
    if rope_type not in ("none", "linear", "yarn"):
        raise ModelLoadError(
            f"{file}: rope.scaling.type {rope_type!r} is not supported, only 'none', 'linear' or 'yarn'"
        )
    factor = scaling.get("factor", fields.get("rope.scale_linear", 1.0)) or 1.0  # 0 stands for 1, too
    scales = rope_type != "none" and factor != 1.0
    context = config["max_position_embeddings"]
    tensor = next((each for each in reader.tensors if each.name == "rope_freqs.weight"), None)
    if tensor is not None:
        if scales:
            raise ModelLoadError(
                f"{file}: rope_freqs.weight and rope.scaling.type {rope_type!r} in one file are not supported"
            )
        factors = _floats(tensor).flatten().tolist()
        pairs = config["head_dim"] // 2
        if len(factors) != pairs:
            raise ModelLoadError(f"{file}: rope_freqs.weight has {len(factors)} factors, expected {pairs}")
        # LongRoPE is what takes any factors; it is neutral but for these if both sets are alike, with an attention
        # factor of 1.
        rope = {"rope_type": "longrope", "short_factor": factors, "long_factor": factors}
        return {**rope, "factor": 1.0, "attention_factor": 1.0, "original_max_position_embeddings": context}
    if not scales:
        return {"rope_type": "default"}
    if rope_type == "linear":
        return {"rope_type": "linear", "factor": factor}
    betas = {name: scaling[f"yarn_{name}"] for name in ("beta_fast", "beta_slow") if f"yarn_{name}" in scaling}
    original = scaling.get("original_context_length", context)
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **betas}


def _by_hf_name(file: Path, reader: GGUFReader, named: str, num_layers: int) -> dict[str, ReaderTensor]:
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(arch for arch in MODEL_ARCH if MODEL_ARCH_NAMES[arch] == named)
    mapping = get_tensor_name_map(arch, num_layers)
    layer = [part for group in (*_MERGED, *_SINGLE) for part in group]
    layer += ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"]
    modules = ["model.embed_tokens", "model.norm", "lm_head"]
    modules += [f"model.layers.{index}.{part}" for index in range(num_layers) for part in layer]
    ours = {mapping.get_name(module): module for module in modules}
    found: dict[str, ReaderTensor] = {}
    for tensor in reader.tensors:
        module, _, end = tensor.name.rpartition(".")
        if module in ours:
            found[f"{ours[module]}.{end}"] = tensor
        elif module != "rope_freqs":  # these are in the config now
            raise ModelLoadError(f"{file}: tensor {tensor.name} is not one of architecture {named!r}")
    return found


def _choose(weights: dict[str, ReaderTensor], num_layers: int) -> tuple[set[str], int, bool]:
    """The projections that stay quantised: those of the commonest width in bits, if all that are merged have it."""
    bits = {
        name.removesuffix(".weight"): _FAMILIES.get(tensor.tensor_type.name)
        for name, tensor in weights.items()
        if name.endswith("_proj.weight")
    }
    common = Counter(each for each in bits.values() if each is not None).most_common(1)
    if not common:
        return set(), 0, False
    chosen = common[0][0]
    quantized: set[str] = set()
    for layer in range(num_layers):
        for group in (*_MERGED, *_SINGLE):
            names = [f"model.layers.{layer}.{part}" for part in group]
            if all(bits.get(name) == chosen for name in names):
                quantized.update(names)
    zero_points = any(weights[f"{name}.weight"].tensor_type.name == "Q4_1" for name in quantized)
    return quantized, chosen, zero_points


def _unpack(tensor: ReaderTensor, zero_points: bool) -> dict[str, torch.Tensor]:
    """The tensors of `Int4` or `Int8` with groups of 32; only zero points are rounded, to float16."""
    kind = tensor.tensor_type.name
    scales = 2 if kind == "Q4_1" else 1  # float16 numbers before those of a group
    rows = len(tensor.data)
    blocks = np.ascontiguousarray(tensor.data).reshape(rows, -1, 2 * scales + (32 if kind == "Q8_0" else 16))
    head = np.ascontiguousarray(blocks[:, :, : 2 * scales]).view(np.float16)
    numbers, scale = blocks[:, :, 2 * scales :], head[:, :, 0].astype(np.float32)
    if kind == "Q8_0":
        weight = np.ascontiguousarray(numbers).view(np.int8).reshape(rows, -1)
        return {"weight": torch.from_numpy(weight), "weight_scale": torch.from_numpy(scale)}
    zero = np.full_like(scale, 8.0)
    if kind == "Q4_1":
        least = head[:, :, 1].astype(np.float32)
        zero = -least / np.where(scale == 0.0, 1.0, scale)
        # float16 rounds a zero point by 2⁻¹¹ of itself, and the weights by as much: less than bfloat16 rounds them. It
        # ends at 65504. A group that is further from 0 has weights of one size, to 15 steps of 65504; so these all
        # become `least`, as in a group whose scale is 0: that is the scale, and the numbers are one too large.
        flat = (scale == 0.0) | (np.abs(zero) > np.finfo(np.float16).max)
        zero = np.where(flat, -1.0, zero)
        scale = np.where(flat, least, scale)
        numbers = np.where(flat[:, :, None], 0, numbers).astype(np.uint8)
    tensors = {
        "weight": torch.from_numpy(np.ascontiguousarray(numbers).reshape(rows, -1)),
        "weight_scale": torch.from_numpy(scale).half(),
    }
    return tensors | ({"weight_zero": torch.from_numpy(zero).half()} if zero_points else {})


def _floats(tensor: ReaderTensor) -> torch.Tensor:
    from gguf.quants import dequantize

    return torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))


def _row_order(named: str, name: str, config: dict[str, Any], rows: int) -> np.ndarray[Any, Any] | None:
    """Llama's rows that rotate together are neighbours in GGUF, and half a head apart in Hugging Face's order."""
    projection = name.split(".")[-2]
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(projection)
    if named != "llama" or heads is None:
        return None
    return np.arange(rows).reshape(config[heads], -1, 2).swapaxes(1, 2).reshape(-1)
