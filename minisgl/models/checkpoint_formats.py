"""Quantised checkpoints as they are published: Hugging Face fp8, compressed-tensors, AWQ and GPTQ.

Each has a section ``quantization_config`` in ``config.json``, and stores a weight in tensors of its own. Here they
become the tensors of a quantiser: other orders of the same numbers, so nothing is rounded again, except scales to the
quantiser's dtype. What is declared and not supported is refused by name, before any tensor is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from minisgl.errors import ModelLoadError
from minisgl.layers.quantization import Quantizer, Tensors
from minisgl.layers.quantizers import Fp8, Fp8Block, Fp8WeightOnly, Int4, Int8, pack_int4
from minisgl.models.quantization import (
    FLOATS,
    ImpliedTensor,
    Mxfp4Format,
    QuantizedCheckpoint,
    SourceTensor,
    WeightFormat,
)

_FP8 = frozenset({"F8_E4M3"})
_I8 = frozenset({"I8"})
_I32 = frozenset({"I32"})
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # place of column i of 8 in a word, in units of 4 bits


def declared_quantization(path: str | Path) -> QuantizedCheckpoint | None:
    """What ``config.json`` in the directory ``path`` declares; None if it declares nothing, or is not there.

    Raises `ModelLoadError` for a scheme that is unknown, or that we cannot compute as it was made.
    """
    file = Path(path) / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError:  # dummy weights need no checkpoint
        return None
    except ValueError as error:
        raise ModelLoadError(f"{file}: cannot be read as JSON: {error}") from error
    section = config.get("quantization_config") if isinstance(config, dict) else None
    if section is None:
        return None
    if not isinstance(section, dict):
        raise ModelLoadError(f"{file}: quantization_config must be an object, got {section!r}")
    declared = _Declared(file, section)
    method = declared.get("quant_method", None)
    if not isinstance(method, str) or method not in _METHODS:
        raise ModelLoadError(
            f"{file}: quant_method {method!r} is not supported; choose a checkpoint with {', '.join(_METHODS)}, or one "
            "that is not quantised, and the option quantization"
        )
    return _METHODS[method](declared)


@dataclass(frozen=True)
class _Declared:
    """A section of ``config.json``, and errors that name the field."""

    file: Path
    fields: Mapping[str, Any]

    def get(self, name: str, default: Any) -> Any:
        value = self.fields.get(name)
        return default if value is None else value

    def require(self, name: str, default: Any, *supported: Any) -> Any:
        """The field's value, which must be one of ``supported``."""
        value = self.get(name, default)
        if value not in supported:
            choices = " or ".join(repr(each) for each in supported)
            raise ModelLoadError(f"{self.file}: {name} {value!r} is not supported, only {choices}")
        return value

    def section(self, name: str) -> _Declared | None:
        """An object inside of this one; None if it is not there, or empty, as some tools write what they don't use."""
        value = self.get(name, None)
        if value is None or value == {}:
            return None
        if not isinstance(value, Mapping):
            raise ModelLoadError(f"{self.file}: {name} must be an object, got {value!r}")
        return _Declared(self.file, value)

    def names(self, name: str) -> tuple[str, ...]:
        value = self.get(name, [])
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise ModelLoadError(f"{self.file}: {name} must be a list of names, got {value!r}")
        for entry in value:
            try:
                re.compile(entry[3:] if entry.startswith("re:") else "")
            except re.error as error:
                raise ModelLoadError(f"{self.file}: {name}: {entry!r} is no regular expression ({error})") from None
        return tuple(value)

    def group_size(self) -> int | None:
        """Weights of a row that share a scale; None if all do."""
        value = self.get("group_size", -1)
        if (
            isinstance(value, bool)
            or not isinstance(value, int)
            or not (value == -1 or (value >= 2 and value % 2 == 0))
        ):
            raise ModelLoadError(f"{self.file}: group_size must be an even number, or -1 for whole rows, got {value!r}")
        return None if value == -1 else value


# -- Hugging Face fp8 --------------------------------------------------------------------------------------------------


def _fp8(declared: _Declared) -> QuantizedCheckpoint:
    declared.require("activation_scheme", "dynamic", "dynamic")
    declared.require("fmt", "e4m3", "e4m3")
    kept = declared.names("modules_to_not_convert") + declared.names("ignored_layers")
    block = declared.get("weight_block_size", None)
    if block is None:
        return QuantizedCheckpoint("fp8", Fp8(), ScaledFormat(_FP8, "tensor"), kept, options=("fp8",))
    if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
        raise ModelLoadError(f"{declared.file}: weight_block_size must be two numbers, got {block!r}")
    format = ScaledFormat(_FP8, "block", "weight_scale_inv", (block[0], block[1]))
    return QuantizedCheckpoint("fp8", Fp8Block((block[0], block[1])), format, kept, options=("fp8", "fp8-block"))


@dataclass(frozen=True)
class ScaledFormat(WeightFormat):
    """8-bit numbers as a quantiser has them, and a scale for a weight, a row or a block."""

    dtypes: frozenset[str]
    strategy: str  # "tensor", "channel" or "block"
    scale: str = "weight_scale"
    block: tuple[int, int] = (1, 1)

    def sources(self, rows: int, columns: int) -> dict[str, SourceTensor]:
        shapes: dict[str, tuple[int, ...]] = {
            "tensor": (1,),
            "channel": (rows, 1),
            "block": (-(-rows // self.block[0]), -(-columns // self.block[1])),
        }
        return {
            "weight": SourceTensor((rows, columns), self.dtypes),
            self.scale: SourceTensor(shapes[self.strategy], FLOATS),
        }

    def convert(self, sources: Tensors) -> dict[str, torch.Tensor]:
        weight, scale = sources["weight"], sources[self.scale].float()
        if self.strategy == "tensor":
            scale = scale.reshape(1, 1).expand(len(weight), 1)
        return {"weight": weight, "weight_scale": scale}


# -- compressed-tensors ------------------------------------------------------------------------------------------------


def _compressed_tensors(declared: _Declared) -> QuantizedCheckpoint:
    groups = declared.get("config_groups", {})
    if not isinstance(groups, dict) or len(groups) != 1:
        raise ModelLoadError(f"{declared.file}: config_groups must be one scheme for all layers, got {groups!r}")
    (group,) = (_Declared(declared.file, groups).section(name) for name in groups)
    weights = group.section("weights") if group is not None else None
    if group is None or weights is None:
        raise ModelLoadError(f"{declared.file}: config_groups has no section 'weights'")
    if group.get("targets", ["Linear"]) != ["Linear"]:
        raise ModelLoadError(f"{declared.file}: targets {group.fields['targets']!r} are not supported, only ['Linear']")
    if group.section("output_activations") is not None or declared.section("kv_cache_scheme") is not None:
        raise ModelLoadError(f"{declared.file}: output_activations and kv_cache_scheme are not supported, only null")
    sparsity = declared.section("sparsity_config")
    if sparsity is not None and sparsity.get("format", None) != "dense":
        raise ModelLoadError(f"{declared.file}: sparsity_config is not supported, only format 'dense'")
    if declared.section("transform_config") is not None:  # rotations of weights, which some layers' inputs need too
        raise ModelLoadError(f"{declared.file}: transform_config is not supported; choose a checkpoint without it")
    form = declared.require("format", None, "float-quantized", "int-quantized", "naive-quantized", "pack-quantized")
    if group.get("format", form) != form:
        raise ModelLoadError(f"{declared.file}: format {group.fields['format']!r} of a group contradicts {form!r}")
    weights.require("dynamic", False, False)
    activations = group.section("input_activations")
    kept = declared.names("ignore")
    if form == "pack-quantized":
        if activations is not None:
            raise ModelLoadError(f"{declared.file}: input_activations are not supported with {form!r}, only null")
        return _pack_quantized(weights, kept)
    bits = weights.require("num_bits", None, 8)
    kind = weights.require("type", None, "float", "int")
    strategy = weights.require("strategy", None, "tensor", "channel")
    weights.require("symmetric", True, True)
    if activations is not None:  # ours: a scale for each token, so no less precise than one for all tokens
        activations.require("num_bits", bits, bits)
        activations.require("type", kind, kind)
        activations.require("dynamic", False, True)
        activations.require("symmetric", True, True)
        activations.require("strategy", "token", "token", "tensor")
    method = f"compressed-tensors {form}"
    if kind == "float":
        quantizer: Quantizer = Fp8WeightOnly() if activations is None else Fp8()
        return QuantizedCheckpoint(method, quantizer, ScaledFormat(_FP8, strategy), kept, options=("fp8",))
    if activations is None:
        raise ModelLoadError(f"{declared.file}: int weights of 8 bits need dynamic input_activations, got null")
    return QuantizedCheckpoint(method, Int8(), ScaledFormat(_I8, strategy), kept, options=("int8",))


def _pack_quantized(weights: _Declared, kept: tuple[str, ...]) -> QuantizedCheckpoint:
    weights.require("num_bits", None, 4)
    weights.require("type", "int", "int")
    strategy = weights.require("strategy", None, "group", "channel")
    weights.require("actorder", "static", "static", "weight", False)  # these two leave the columns in order
    size = weights.group_size() if strategy == "group" else None
    zeros = not weights.require("symmetric", True, True, False)
    options = ("int4-zero-point",) if zeros else ("int4",)
    quantizer = Int4(size or 0, zeros)
    format = PackedRowsFormat(size, zeros, weights.file)
    return QuantizedCheckpoint("compressed-tensors pack-quantized", quantizer, format, kept, options)


@dataclass(frozen=True)
class PackedRowsFormat(WeightFormat):
    """compressed-tensors: eight columns in a word, the first in its lowest bits; zero points are packed by rows."""

    group_size: int | None
    zero_points: bool
    file: Path

    def sources(self, rows: int, columns: int) -> dict[str, SourceTensor]:
        groups = _groups(self.file, columns, self.group_size)
        tensors = {
            "weight_packed": SourceTensor((rows, -(-columns // 8)), _I32),
            "weight_scale": SourceTensor((rows, groups)),
        }
        zeros = {"weight_zero_point": SourceTensor((-(-rows // 8), groups), _I32)} if self.zero_points else {}
        return tensors | zeros

    def implied(self, rows: int, columns: int) -> dict[str, ImpliedTensor]:
        return {"weight_shape": ImpliedTensor(torch.tensor([rows, columns]), "the weight has another shape")}

    def convert(self, sources: Tensors) -> dict[str, torch.Tensor]:
        scale = sources["weight_scale"]
        zero = None
        if self.zero_points:
            zero = _unpack(sources["weight_zero_point"].T).T[: len(scale)]
        # Numbers from -8 to 7 are stored 8 higher, which is what a zero point of 8 means.
        return _int4_tensors(_unpack(sources["weight_packed"]), scale, zero)


# -- AWQ and GPTQ ------------------------------------------------------------------------------------------------------


def _awq(declared: _Declared) -> QuantizedCheckpoint:
    declared.require("bits", None, 4)
    declared.require("version", "gemm", "gemm", "GEMM")
    declared.require("zero_point", True, True)
    size = declared.group_size()
    kept = declared.names("modules_to_not_convert")
    return QuantizedCheckpoint(
        "awq", Int4(size or 0, True), AwqFormat(size, declared.file), kept, options=("int4-zero-point",)
    )


@dataclass(frozen=True)
class AwqFormat(WeightFormat):
    """AWQ (Lin et al. 2023): the transposed weight, eight outputs in a word, in the order 0 2 4 6 1 3 5 7."""

    group_size: int | None
    file: Path

    def sources(self, rows: int, columns: int) -> dict[str, SourceTensor]:
        groups = _groups(self.file, columns, self.group_size)
        _check_eighths(self.file, rows)
        return {
            "qweight": SourceTensor((columns, rows // 8), _I32),
            "qzeros": SourceTensor((groups, rows // 8), _I32),
            "scales": SourceTensor((groups, rows)),
        }

    def convert(self, sources: Tensors) -> dict[str, torch.Tensor]:
        numbers, zero = (_unpack(sources[name], _AWQ_ORDER).T for name in ("qweight", "qzeros"))
        return _int4_tensors(numbers, sources["scales"].T, zero)


def _gptq(declared: _Declared) -> QuantizedCheckpoint:
    declared.require("bits", None, 4)
    if declared.get("desc_act", False):
        raise ModelLoadError(
            f"{declared.file}: desc_act (act-order) is not supported, because the groups of a row are then scattered; "
            "choose a checkpoint with desc_act false"
        )
    # With these, layers differ in how they are quantised, and we would look for tensors that are not there.
    for name in ("dynamic", "modules_in_block_to_quantize", "lm_head"):
        if declared.get(name, None):
            raise ModelLoadError(
                f"{declared.file}: {name} {declared.fields[name]!r} is not supported; choose a checkpoint without it, "
                "which quantises all linear layers but the LM head, and all alike"
            )
    version = declared.require("checkpoint_format", "gptq", "gptq", "gptq_v2")
    size = declared.group_size()
    offset = 1 if version == "gptq" else 0
    format = GptqFormat(size, offset, declared.file)
    return QuantizedCheckpoint("gptq", Int4(size or 0, True), format, (), ("int4", "int4-zero-point"))


@dataclass(frozen=True)
class GptqFormat(WeightFormat):
    """GPTQ (Frantar et al. 2022): the transposed weight, eight inputs in a word; zero points are ``offset`` lower."""

    group_size: int | None
    offset: int
    file: Path

    def sources(self, rows: int, columns: int) -> dict[str, SourceTensor]:
        groups = _groups(self.file, columns, self.group_size)
        _check_eighths(self.file, rows)
        _check_eighths(self.file, columns)
        return {
            "qweight": SourceTensor((columns // 8, rows), _I32),
            "qzeros": SourceTensor((groups, rows // 8), _I32),
            "scales": SourceTensor((groups, rows)),
        }

    def implied(self, rows: int, columns: int) -> dict[str, ImpliedTensor]:
        # The group that a column is in; and some exports add biases of zeros.
        groups = torch.arange(columns, dtype=torch.int32) // (self.group_size or columns)
        return {
            "g_idx": ImpliedTensor(groups, "the groups of a row are scattered (act-order), which is not supported"),
            "bias": ImpliedTensor(torch.zeros(()).expand(rows), "the model has no such bias"),
        }

    def convert(self, sources: Tensors) -> dict[str, torch.Tensor]:
        zero = (_unpack(sources["qzeros"]) + self.offset) & 15
        return _int4_tensors(_unpack(sources["qweight"].T), sources["scales"].T, zero.T)


def _mxfp4(declared: _Declared) -> QuantizedCheckpoint:
    """gpt-oss: only its experts are quantised, whatever ``modules_to_not_convert`` lists."""
    return QuantizedCheckpoint("mxfp4", None, Mxfp4Format())


# -- ours --------------------------------------------------------------------------------------------------------------


def _gguf(declared: _Declared) -> QuantizedCheckpoint:
    """What `minisgl.models.gguf` writes."""
    bits = declared.require("bits", None, 4, 8)
    size = declared.group_size() or 0
    zeros = declared.require("zero_point", False, True, False)
    quantizer: Quantizer = Int8(size) if bits == 8 else Int4(size, zeros)
    return QuantizedCheckpoint("gguf", quantizer, OwnFormat(quantizer), declared.names("modules_to_not_convert"))


@dataclass(frozen=True)
class OwnFormat(WeightFormat):
    """The quantiser's tensors, under its names."""

    quantizer: Quantizer

    def sources(self, rows: int, columns: int) -> dict[str, SourceTensor]:
        dtypes = {torch.uint8: "U8", torch.int8: "I8", torch.float16: "F16", torch.float32: "F32"}
        layout = self.quantizer.layout(columns).items()
        return {
            name: SourceTensor(blocks.shape(rows, columns), frozenset({dtypes[blocks.dtype]}))
            for name, blocks in layout
        }

    def convert(self, sources: Tensors) -> dict[str, torch.Tensor]:
        return dict(sources)


def _groups(file: Path, columns: int, group_size: int | None) -> int:
    size = group_size or columns
    if columns % size or columns % 8:
        raise ModelLoadError(
            f"{file}: group_size {size} does not divide the {columns} inputs of a layer into groups of whole words"
        )
    return columns // size


def _check_eighths(file: Path, size: int) -> None:
    if size % 8:
        raise ModelLoadError(
            f"{file}: {size} numbers of 4 bits do not fill words of 32 bits; a layer needs multiples of 8"
        )


def _unpack(words: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """int32[N, K / 8] → uint8[N, K]: number i of each eight is ``order[i]`` from the lowest bits of its word."""
    shifts = torch.tensor(order, dtype=torch.int32, device=words.device) * 4
    return ((words.unsqueeze(-1) >> shifts) & 15).flatten(1).to(torch.uint8)


def _int4_tensors(numbers: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The tensors of `Int4`, from uint8[N, K] and a scale and a zero point for each group, [N, groups]."""
    packed = pack_int4(numbers.unflatten(1, (scale.shape[1], -1)))
    tensors = {"weight": packed, "weight_scale": scale.half()}
    return tensors if zero is None else tensors | {"weight_zero": zero.half()}


_METHODS: dict[str, Callable[[_Declared], QuantizedCheckpoint]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "awq": _awq,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
    "gguf": _gguf,
}
