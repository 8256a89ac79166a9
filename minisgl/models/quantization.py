"""Which weights of a model are quantised, how, and from which tensors of a checkpoint they are made."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import nn

from minisgl.errors import ConfigError, ModelLoadError
from minisgl.layers.embedding import Embedding, LMHead
from minisgl.layers.linear import Linear, MergedColumnParallelLinear, RowParallelLinear
from minisgl.layers.mlp import Experts
from minisgl.layers.quantization import (
    QUANTIZERS,
    QuantizedWeight,
    Quantizer,
    Tensors,
    check_blocks,
    quantize_checked,
)
from minisgl.layers.sharding import Shard, ShardSpec
from minisgl.registry import build

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Safetensors' names of the dtypes that are converted to the model's."""


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """What a tensor of a checkpoint must be like."""

    shape: tuple[int, ...]
    dtypes: frozenset[str] = FLOATS

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor may have this shape. One number may have no dimension: tools write both."""
        return shape == self.shape or (shape == () and self.shape == (1,))

    @property
    def dtype_names(self) -> str:
        return " or ".join(sorted(self.dtypes))


@dataclass(frozen=True, slots=True)
class ImpliedTensor:
    """The only content with which a tensor of a checkpoint tells nothing new."""

    content: torch.Tensor
    otherwise: str  # what another content means, for an error


class WeightFormat(Protocol):
    """How a checkpoint stores a weight: as one tensor, or as several whose names begin alike."""

    def sources(self, rows: int, columns: int) -> dict[str, SourceTensor]:
        """The tensors of a weight, by the ends of their names. Raises `ModelLoadError` for a shape it cannot have."""
        ...

    def implied(self, rows: int, columns: int) -> dict[str, ImpliedTensor]:
        """Tensors that a checkpoint may have, and need not, by the ends of their names."""
        return {}

    def convert(self, sources: Tensors) -> dict[str, torch.Tensor]:
        """The quantiser's tensors of the weight."""
        ...


@dataclass(frozen=True)
class PlainFormat(WeightFormat):
    """Floats, quantised while they are loaded."""

    quantize: Callable[[torch.Tensor], dict[str, torch.Tensor]]

    def sources(self, rows: int, columns: int) -> dict[str, SourceTensor]:
        return {"weight": SourceTensor((rows, columns))}

    def convert(self, sources: Tensors) -> dict[str, torch.Tensor]:
        return self.quantize(sources["weight"])


@dataclass(frozen=True)
class QuantizedCheckpoint:
    """What ``quantization_config`` in ``config.json`` declares, or the tensor types of a GGUF file."""

    method: str  # as the file calls it
    quantizer: Quantizer | None  # None: experts in MXFP4, which are dequantised
    format: WeightFormat
    kept: tuple[str, ...] = ()  # modules that are not quantised: names, parts of names, or "re:" and a pattern
    options: tuple[str, ...] = ()  # names in `QUANTIZERS` that mean the same

    def keeps(self, module: str) -> bool:
        """Whether the module is not quantised."""
        return any(
            re.match(entry[3:], module) if entry.startswith("re:") else f".{entry}." in f".{module}."
            for entry in self.kept
        )


@dataclass(frozen=True)
class QuantizationPlan:
    """What the loader does: quantise with `quantizer`, which is None for plain weights, from weights in `format`."""

    quantizer: Quantizer | None = None
    checkpoint: QuantizedCheckpoint | None = None
    format: WeightFormat = field(default_factory=lambda: PlainFormat(lambda weight: {"weight": weight}))

    @property
    def quantizes_embeddings(self) -> bool:
        return self.checkpoint is None and self.quantizer is not None and self.quantizer.quantizes_embeddings

    def concerns(self, name: str, module: nn.Module) -> bool:
        """Whether ``name``, a weight of a checkpoint that belongs into ``module``, is quantised here or there."""
        if self.quantizer is None and self.checkpoint is None:
            return False
        if isinstance(module, Embedding | LMHead):
            return self.quantizes_embeddings
        if not isinstance(module, MergedColumnParallelLinear | RowParallelLinear):
            return False
        return self.checkpoint is None or not self.checkpoint.keeps(name.removesuffix(".weight"))


def plan_quantization(option: str, checkpoint: QuantizedCheckpoint | None, dummy: bool) -> QuantizationPlan:
    """Bring together the option ``quantization`` and what the checkpoint declares.

    Raises `ConfigError` for an unknown option, a class that cannot be used, or what contradicts the checkpoint.
    """
    quantizer: Quantizer | None
    if option == "auto":
        if checkpoint is None or (dummy and checkpoint.quantizer is None):
            return QuantizationPlan()
        quantizer = checkpoint.quantizer
    elif option == "none":
        return (
            QuantizationPlan() if checkpoint is None or dummy else QuantizationPlan(None, checkpoint, checkpoint.format)
        )
    elif checkpoint is not None and not dummy:
        if option not in checkpoint.options:
            raise ConfigError(
                f"quantization: {option!r} contradicts the checkpoint, which is quantised by {checkpoint.method!r}; "
                "use 'auto', or 'none' to dequantise it"
            )
        quantizer = checkpoint.quantizer
    else:
        quantizer = build("quantization", option, QUANTIZERS, Quantizer)
        if option not in QUANTIZERS:
            return QuantizationPlan(quantizer, None, PlainFormat(partial(quantize_checked, quantizer)))
    if (dummy or checkpoint is None) and quantizer is not None:
        return QuantizationPlan(quantizer, None, PlainFormat(quantizer.quantize))
    assert checkpoint is not None
    return QuantizationPlan(quantizer, checkpoint, checkpoint.format)


class Region(Protocol):
    """The loader's target of a tensor: a region of a parameter, and the shard of the tensor that goes there."""

    @property
    def module(self) -> nn.Module: ...

    @property
    def parameter(self) -> str: ...

    @property
    def index(self) -> tuple[int | slice, ...]: ...

    @property
    def shard_spec(self) -> ShardSpec | None: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def load(self, tensor: torch.Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class QuantizedTarget:
    """Where a weight that is quantised in the checkpoint, in the model, or in both goes."""

    name: str  # of the weight
    plan: QuantizationPlan
    region: Region
    shape: tuple[int, ...]  # [N, K] of the whole weight in the checkpoint
    weight: QuantizedWeight | None  # None: it is dequantised

    @property
    def sources(self) -> dict[str, SourceTensor]:
        rows, columns = self.shape
        return self.plan.format.sources(rows, columns)

    def fill(self, sources: Tensors) -> None:
        """Convert the checkpoint's tensors, whole, and keep this rank's part.

        Raises `ModelLoadError` for scales that are not finite, or not in the quantiser's dtype.
        """
        tensors = self.plan.format.convert(sources)
        if self.plan.checkpoint is not None:
            self._check_finite(sources, tensors)
        if self.weight is None:
            assert self.plan.checkpoint is not None
            assert self.plan.checkpoint.quantizer is not None
            self.region.load(self.plan.checkpoint.quantizer.dequantize(tensors))
            return
        for rows, columns, first in _parts(self.region, self.shape, self.weight.rows):
            self._copy(tensors, self.weight, rows, columns, first)

    def _check_finite(self, sources: Tensors, tensors: Tensors) -> None:
        for end, tensor in sources.items():
            if not _is_finite(tensor):
                raise ModelLoadError(
                    f"{self.name.removesuffix('weight')}{end} has numbers that are not finite; download the checkpoint "
                    "again, or choose another"
                )
        for end, tensor in tensors.items():
            if not _is_finite(tensor):
                dtype = str(tensor.dtype).removeprefix("torch.")
                raise ModelLoadError(
                    f"{self.name}: its {end} has numbers that are not finite in {dtype}; choose another checkpoint"
                )

    def _copy(self, tensors: Tensors, weight: QuantizedWeight, rows: Shard, columns: Shard, first: int) -> None:
        stop = min(rows.stop, rows.total)  # the rest is padding of the vocabulary
        size = max(stop - rows.start, 0)
        for name, blocks in weight.layout.items():
            memory = getattr(weight, name)
            whole = memory[blocks.region(slice(first, first + rows.size), slice(0, columns.size))]
            if size < rows.size:
                whole.zero_()
            part = blocks.region(slice(rows.start, max(stop, rows.start)), slice(columns.start, columns.stop))
            whole[: -(-size // blocks.rows)].copy_(tensors[name][part])


def _is_finite(tensor: torch.Tensor) -> bool:
    """True for the weights themselves, which are integers or e4m3."""
    return not tensor.is_floating_point() or tensor.dtype.itemsize == 1 or bool(tensor.isfinite().all())


def _parts(region: Region, shape: tuple[int, ...], rows_here: int) -> Iterator[tuple[Shard, Shard, int]]:
    """This rank's rows and columns of the checkpoint's weight, and the row of its own weight where they begin.

    Of a packed weight a rank has rows of each part."""
    spec = region.shard_spec
    columns = spec.shard if spec is not None and spec.dim == 1 else Shard.whole(shape[1])
    index = region.index[0] if region.index else slice(0, rows_here)
    assert isinstance(index, slice), "only experts are indexed by a number, and these are not quantised"
    first, before = index.start, 0
    for shard in spec.shards if spec is not None and spec.dim == 0 else (Shard.whole(shape[0]),):
        yield Shard(before + shard.start, before + shard.stop, shape[0]), columns, first
        first, before = first + shard.size, before + shard.total


class Mxfp4Format(PlainFormat):
    """The experts of gpt-oss; see `Mxfp4Target`. Everything else is floats."""

    def __init__(self) -> None:
        super().__init__(lambda weight: {"weight": weight})


@dataclass(frozen=True, slots=True)
class Mxfp4Target:
    """Where the weights of a layer's experts go, [E, K, N], which a checkpoint has in MXFP4 (OCP 2023), and transposed.

    A block is 32 numbers of 4 bits, with a power of two for all of them. bfloat16 holds their product exactly.
    """

    name: str  # of the weights
    region: Region

    @property
    def shape(self) -> tuple[int, ...]:
        """[E, K, N] of all ranks."""
        return self.region.shape

    @property
    def sources(self) -> dict[str, SourceTensor]:
        experts, columns, rows = self.shape
        bytes_ = frozenset({"U8"})
        blocks = SourceTensor((experts, rows, columns // 32, 16), bytes_)
        return {"_blocks": blocks, "_scales": SourceTensor((experts, rows, columns // 32), bytes_)}

    def fill(self, sources: Tensors) -> None:
        """Dequantise all experts, and keep this rank's part. Raises `ModelLoadError` for a scale that is no number."""
        blocks = sources["_blocks"]
        if bool((sources["_scales"] == 255).any()):
            raise ModelLoadError(f"{self.name}_scales has numbers that are not finite; download the checkpoint again")
        magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
        values = torch.tensor([*magnitudes, *(-each for each in magnitudes)], dtype=torch.bfloat16)
        pairs = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)  # the first number is in the low bits
        numbers = values.to(blocks.device)[pairs.int()]
        exponents = sources["_scales"].int() - 127
        weight = torch.ldexp(numbers, exponents.unsqueeze(-1)).flatten(-2)
        self.region.load(weight.transpose(1, 2))


R = TypeVar("R", bound=Region)


def quantize_weights(
    model: nn.Module, targets: dict[str, R], plan: QuantizationPlan, dtype: torch.dtype
) -> dict[str, QuantizedTarget | Mxfp4Target]:
    """Put a `QuantizedWeight` in the place of every weight that ``plan`` concerns, still without memory.

    Takes their targets out of ``targets``, and returns new ones, by the checkpoint's name of the weight.

    Raises:
        ConfigError: the scheme cannot have these shapes, the ranks would cut through its blocks, or there are experts.
        ModelLoadError: a checkpoint keeps one part of a merged projection, and quantises another.
    """
    if isinstance(plan.format, Mxfp4Format):
        names = [name for name, target in targets.items() if name.endswith(("gate_up_proj", "down_proj"))]
        return {name: Mxfp4Target(name, targets.pop(name)) for name in names}
    if (plan.quantizer or plan.checkpoint) and any(isinstance(module, Experts) for module in model.modules()):
        raise ConfigError("quantization: a mixture of experts cannot be quantised yet; use 'none' and other weights")
    chosen = {name: target for name, target in targets.items() if _is_chosen(name, target, plan)}
    _check_mixed(chosen, targets)
    shapes = {name: target.shape for name, target in chosen.items()}
    for rows, columns in shapes.values():
        plan.format.sources(rows, columns)  # refuses a shape before the quantiser does, and names the file
    weights: dict[Linear | Embedding, QuantizedWeight] = {}
    found: dict[str, QuantizedTarget | Mxfp4Target] = {}
    for name, target in chosen.items():
        weight = None
        if plan.quantizer is not None:
            module = target.module
            assert isinstance(module, Linear | Embedding)
            for part, inputs, first in _parts(target, shapes[name], module.weight.shape[0]):
                if module not in weights:
                    weights[module] = QuantizedWeight(plan.quantizer, module.weight.shape[0], inputs, dtype)
                weight = weights[module]
                if not (part.is_whole and inputs.is_whole):
                    remedy = "fewer ranks (tensor_parallel_size), or other weights"
                else:
                    remedy = "'none', or another scheme" if plan.checkpoint is None else "'none' to dequantise it"
                check_blocks(name, weight.layout, part, inputs, remedy)
                check_blocks(name, weight.layout, Shard(first, first + part.size, weight.rows), inputs, remedy)
        found[name] = QuantizedTarget(name, plan, target, shapes[name], weight)
        del targets[name]
    for module, weight in weights.items():
        del module.weight  # a parameter, which a module cannot replace
        module.weight = weight
    return found


def _is_chosen(name: str, target: Region, plan: QuantizationPlan) -> bool:
    return target.parameter == "weight" and plan.concerns(name, target.module)


def _check_mixed(chosen: Mapping[str, Region], targets: Mapping[str, Region]) -> None:
    modules = {target.module for target in chosen.values()}
    for name, target in targets.items():
        if target.parameter == "weight" and target.module in modules and name not in chosen:
            raise ModelLoadError(
                f"{name} is not quantised, but projections that are merged with it are; this mixture is not supported"
            )


def implied_tensors(targets: Mapping[str, QuantizedTarget | Mxfp4Target]) -> dict[str, ImpliedTensor]:
    """What a checkpoint may have besides, by the names of its tensors, unless the model has a place for them."""
    return {
        f"{name.removesuffix('weight')}{end}": tensor
        for name, target in targets.items()
        if isinstance(target, QuantizedTarget)
        for end, tensor in target.plan.format.implied(*target.shape).items()
    }


def source_names(targets: Mapping[str, QuantizedTarget | Mxfp4Target]) -> Iterator[tuple[str, str, SourceTensor]]:
    """(name of a weight, name of a checkpoint tensor of it, what that must be like)."""
    for name, target in targets.items():
        for end, source in target.sources.items():
            yield name, f"{name.removesuffix('weight')}{end}", source
