"""Writes tiny checkpoints in the formats that quantised models are published in, and reads them by the formats' rules.

Packing and dequantisation are loops over single numbers, in NumPy, and share nothing with the loader.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.model_zoo import tiny_checkpoint

Array = np.ndarray[Any, Any]
Stored = dict[str, torch.Tensor]
GROUP = 32
BLOCK = 32
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}


def plain_checkpoint(directory: Path, **overrides: Any) -> Path:
    """A tiny Qwen3 whose widths are multiples of `GROUP` and `BLOCK`."""
    return tiny_checkpoint(directory, "Qwen3ForCausalLM", **{**SIZES, **overrides})[0]


def publish(
    plain: Path, target: Path, config: dict[str, Any], store: Callable[[torch.Tensor, int], tuple[Stored, Array]]
) -> dict[str, torch.Tensor]:
    """Write ``plain`` as a quantised checkpoint, and return its tensors dequantised.

    Args:
        store: a weight, [N, K], and a seed → its tensors by the ends of their names, and the weight they stand for.
    """
    target.mkdir()
    fields = json.loads((plain / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**fields, "quantization_config": config}))
    stored, meant = {}, {}
    for seed, (name, tensor) in enumerate(sorted(load_file(plain / "model.safetensors").items())):
        if not name.endswith(tuple(f"{each}.weight" for each in PROJECTIONS)):
            stored[name] = meant[name] = tensor
            continue
        tensors, weight = store(tensor, seed)
        stored.update({f"{name.removesuffix('weight')}{end}": each.contiguous() for end, each in tensors.items()})
        meant[name] = torch.from_numpy(np.ascontiguousarray(weight, dtype=np.float32))
    save_file(stored, target / "model.safetensors")
    return meant


def edit_config(path: Path, **changes: Any) -> None:
    """Change fields of ``quantization_config``."""
    file = path / "config.json"
    fields = json.loads(file.read_text())
    fields["quantization_config"].update(changes)
    file.write_text(json.dumps(fields))


# -- 8 bits ------------------------------------------------------------------------------------------------------------

FP8_BLOCK = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["lm_head"],
}


def store_fp8_blocks(weight: torch.Tensor, seed: int) -> tuple[Stored, Array]:
    rows, columns = weight.shape
    scale = np.zeros((rows // BLOCK, columns // BLOCK), dtype=np.float32)
    numbers = torch.zeros(rows, columns)
    meant = np.zeros((rows, columns))
    for i in range(rows // BLOCK):
        for j in range(columns // BLOCK):
            block = weight[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
            scale[i, j] = float(block.abs().max()) / 448.0
            numbers[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK] = block / float(scale[i, j])
    stored = numbers.to(torch.float8_e4m3fn)
    for row in range(rows):
        for column in range(columns):
            meant[row, column] = float(stored[row, column]) * scale[row // BLOCK, column // BLOCK]
    return {"weight": stored, "weight_scale_inv": torch.from_numpy(scale)}, meant


def compressed(form: str, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


FP8_WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
FP8_TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
FP8_CHANNEL = compressed("float-quantized", FP8_WEIGHTS, FP8_TOKENS)
FP8_TENSOR = compressed("float-quantized", {**FP8_WEIGHTS, "strategy": "tensor"}, FP8_TOKENS)
INT8_CHANNEL = compressed("int-quantized", {**FP8_WEIGHTS, "type": "int"}, {**FP8_TOKENS, "type": "int"})


def store_fp8_channels(weight: torch.Tensor, seed: int) -> tuple[Stored, Array]:
    scale = (weight.abs().amax(dim=1, keepdim=True) / 448.0).bfloat16()
    numbers = (weight / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": scale}, (numbers.double() * scale.double()).numpy()


def store_fp8_tensor(weight: torch.Tensor, seed: int) -> tuple[Stored, Array]:
    scale = weight.abs().max().reshape(1) / 448.0
    numbers = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": scale}, (numbers.double() * scale.double()).numpy()


def store_int8_channels(weight: torch.Tensor, seed: int) -> tuple[Stored, Array]:
    scale = weight.abs().amax(dim=1, keepdim=True) / 127.0
    numbers = (weight / scale).round().to(torch.int8)
    return {"weight": numbers, "weight_scale": scale}, (numbers.double() * scale.double()).numpy()


# -- 4 bits ------------------------------------------------------------------------------------------------------------

AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
W4A16 = compressed(
    "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}, None
)
W4A16_ZERO = compressed(
    "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": False}, None
)


def groups_of(weight: torch.Tensor, seed: int) -> tuple[Array, Array, Array, Array]:
    """uint8[N, K] numbers, float16[N, groups] scales and uint8[N, groups] zero points, both random, and the weight."""
    rng = np.random.default_rng(seed)
    rows, columns = weight.shape
    count = columns // GROUP
    largest = weight.abs().reshape(rows, count, GROUP).amax(dim=2).numpy()
    scale = (largest / rng.uniform(6.5, 7.5, largest.shape)).astype(np.float16)
    zero = rng.integers(1, 16, largest.shape, dtype=np.uint8)
    numbers = np.zeros((rows, columns), dtype=np.uint8)
    meant = np.zeros((rows, columns))
    for row in range(rows):
        for column in range(columns):
            s, z = float(scale[row, column // GROUP]), int(zero[row, column // GROUP])
            numbers[row, column] = min(max(round(float(weight[row, column]) / s) + z, 0), 15)
            meant[row, column] = (int(numbers[row, column]) - z) * s
    return numbers, scale, zero, meant


def words(numbers: Array, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5, 6, 7)) -> torch.Tensor:
    """[N, K] of 0 to 15 → int32[N, K / 8]: the i-th four bits of a word, from below, hold number ``order[i]``."""
    rows, columns = numbers.shape
    packed = np.zeros((rows, columns // 8), dtype=np.uint32)
    for row in range(rows):
        for word in range(columns // 8):
            for place, number in enumerate(order):
                packed[row, word] |= np.uint32(int(numbers[row, 8 * word + number]) << (4 * place))
    return torch.from_numpy(packed.view(np.int32))


def store_awq(weight: torch.Tensor, seed: int) -> tuple[Stored, Array]:
    numbers, scale, zero, meant = groups_of(weight, seed)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    stored = {"qweight": words(numbers.T, order), "qzeros": words(zero.T, order)}
    return {**stored, "scales": torch.from_numpy(scale.T.copy())}, meant


def store_gptq(weight: torch.Tensor, seed: int, offset: int = 1) -> tuple[Stored, Array]:
    numbers, scale, zero, meant = groups_of(weight, seed)
    stored = {
        "qweight": words(numbers).T,
        "qzeros": words((zero - offset).T),
        "scales": torch.from_numpy(scale.T.copy()),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // GROUP,
    }
    return stored, meant


def store_packed(weight: torch.Tensor, seed: int) -> tuple[Stored, Array]:
    numbers, scale, zero, meant = groups_of(weight, seed)
    meant = meant + np.repeat((zero.astype(np.int64) - 8) * scale.astype(np.float64), GROUP, axis=1)
    shape = torch.tensor(weight.shape, dtype=torch.int64)
    return {"weight_packed": words(numbers), "weight_scale": torch.from_numpy(scale), "weight_shape": shape}, meant


def store_packed_zeros(weight: torch.Tensor, seed: int) -> tuple[Stored, Array]:
    numbers, scale, zero, meant = groups_of(weight, seed)
    stored = {"weight_packed": words(numbers), "weight_scale": torch.from_numpy(scale)}
    shape = torch.tensor(weight.shape, dtype=torch.int64)
    return {**stored, "weight_zero_point": words(zero.T).T, "weight_shape": shape}, meant


FORMATS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor, int], tuple[Stored, Array]]]] = {
    "fp8-block": (FP8_BLOCK, store_fp8_blocks),
    "fp8-channel": (FP8_CHANNEL, store_fp8_channels),
    "fp8-tensor": (FP8_TENSOR, store_fp8_tensor),
    "int8-channel": (INT8_CHANNEL, store_int8_channels),
    "w4a16": (W4A16, store_packed),
    "w4a16-zero": (W4A16_ZERO, store_packed_zeros),
    "awq": (AWQ, store_awq),
    "gptq": (GPTQ, store_gptq),
    "gptq-v2": ({**GPTQ, "checkpoint_format": "gptq_v2"}, lambda weight, seed: store_gptq(weight, seed, offset=0)),
}
