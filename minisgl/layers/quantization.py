"""Quantised weights, as the layers see them: what a scheme must know, and the weight that takes a parameter's place.

With few tokens, a linear layer takes as long as its bytes take to arrive. A quantiser stores numbers of 8 or 4 bits,
and a scale for every block of them. The layers stay the same, and ask another object for their product. The schemes
themselves are in `minisgl.layers.quantizers`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import nn

from minisgl.errors import ConfigError, explained, short_repr
from minisgl.kvcache.pool import byte_view
from minisgl.layers.sharding import Shard
from minisgl.registry import Registry

_FP8_CAPABILITY = (8, 9)

Tensors = Mapping[str, torch.Tensor]
"""What a scheme stores in place of a weight: ``"weight"``, the small numbers, and what scales them."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """A tensor with one element for each block of a weight: ``rows`` of its rows by ``columns`` of its columns.

    0 stands for all columns. The last block of a dimension may be smaller.
    """

    rows: int
    columns: int
    dtype: torch.dtype

    def shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Shape of the tensor for a weight of [rows, columns]."""
        return -(-rows // self.rows), -(-columns // self.columns) if self.columns else 1

    def region(self, rows: slice, columns: slice) -> tuple[slice, slice]:
        """Where the tensor has the blocks of ``weight[rows, columns]``, whose borders must be borders of blocks."""
        along = _divided(columns, self.columns) if self.columns else slice(0, 1)
        return _divided(rows, self.rows), along


def _divided(elements: slice, size: int) -> slice:
    return slice(elements.start // size, -(-elements.stop // size))


class Quantizer(Protocol):
    """A scheme. A weight is [N, K]: N outputs by K inputs.

    Rows are independent: what stands for some rows of a weight, or for columns that are whole blocks, is that part of
    what stands for the weight. Ranks and merged projections rely on it.
    """

    quantizes_embeddings: bool
    """Whether the token embedding and the LM head are quantised too when a checkpoint is quantised on the fly."""

    def layout(self, columns: int) -> Mapping[str, Blocks]:
        """The tensors of a weight with so many columns. Raises `ConfigError` if no block fits."""
        ...

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Quantise a float weight, [N, K]."""
        ...

    def dequantize(self, tensors: Tensors) -> torch.Tensor:
        """The weight that ``tensors`` stand for, float32[N, K]."""
        ...

    def linear(self, x: torch.Tensor, tensors: Tensors, bias: torch.Tensor | None) -> torch.Tensor:
        """``x Wᵀ + b``: [T, K] → [T, N] in the dtype of ``x``. A row of ``x`` does not depend on the others."""
        ...

    def prepack(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """The same weight in the layout that `linear` computes fastest with on its device; may return what it got."""
        ...


QUANTIZERS: Registry[type[Quantizer]] = {
    "fp8": "minisgl.layers.quantizers:Fp8",
    "fp8-block": "minisgl.layers.quantizers:Fp8Block",
    "int4": "minisgl.layers.quantizers:Int4",
    "int4-zero-point": "minisgl.layers.quantizers:Int4ZeroPoint",
    "int8": "minisgl.layers.quantizers:Int8",
}


def _of(quantizer: Quantizer) -> str:
    return f"quantization: {type(quantizer).__module__}:{type(quantizer).__qualname__}"


def layout_of(quantizer: Quantizer, columns: int) -> Mapping[str, Blocks]:
    """The tensors of a weight with so many columns. Raises `ConfigError`, which names the class, if they cannot be."""
    with explained(f"{_of(quantizer)}.layout({columns}) failed"):
        layout: object = quantizer.layout(columns)
    if not isinstance(layout, Mapping) or not layout:
        raise ConfigError(f"{_of(quantizer)}.layout must return a dict of name to Blocks, got {short_repr(layout)}")
    for name, blocks in layout.items():
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(f"{_of(quantizer)}.layout: a tensor must be called like a variable, got {name!r}")
        if not isinstance(blocks, Blocks) or blocks.rows < 1 or blocks.columns < 0:
            wanted = "must be Blocks(rows, columns, dtype) with rows of at least 1 and columns of at least 0"
            raise ConfigError(f"{_of(quantizer)}.layout: {name!r} {wanted}, got {short_repr(blocks)}")
    return layout


def quantize_checked(quantizer: Quantizer, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Quantise a float weight, [N, K], by a class given as ``module:Class``.

    Raises `ConfigError`, which names the class and the tensor, unless all tensors are as the layout says.
    """
    with explained(f"{_of(quantizer)}.quantize failed"):
        tensors: object = quantizer.quantize(weight)
    if not isinstance(tensors, Mapping):
        raise ConfigError(f"{_of(quantizer)}.quantize must return a dict of tensors, got {type(tensors).__name__}")
    layout = layout_of(quantizer, weight.shape[1])
    expected = {name: _described(blocks.dtype, blocks.shape(*weight.shape)) for name, blocks in layout.items()}
    for name in (*expected, *(tensors.keys() - expected.keys())):
        given = tensors.get(name)
        found = _described(given.dtype, given.shape) if isinstance(given, torch.Tensor) else short_repr(given)
        wanted = expected.get(name, "left out")
        if found != wanted:
            raise ConfigError(
                f"{_of(quantizer)}.quantize: of a weight {list(weight.shape)}, the layout wants {name!r} to be "
                f"{wanted}, got {found}"
            )
    return dict(tensors)


def _described(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


class QuantizedWeight(nn.Module):
    """Stands where a layer's ``weight`` was. Its parameters are the tensors of the quantiser.

    Args:
        rows: N, of this rank.
        columns: K, this rank's part of the weight's inputs.
        dtype: of the model, which `lookup` returns.

    Raises `ConfigError`, like `layout_of`.
    """

    def __init__(self, quantizer: Quantizer, rows: int, columns: Shard, dtype: torch.dtype) -> None:
        super().__init__()
        self.quantizer = quantizer
        self.dtype = dtype
        self.rows = rows
        self.columns = columns.size
        self.layout = layout_of(quantizer, columns.total)
        for name, blocks in self.layout.items():
            if hasattr(self, name):
                raise ConfigError(f"{_of(quantizer)}: a tensor cannot be called {name!r}; rename it in layout()")
            memory = torch.empty(blocks.shape(rows, columns.size), dtype=blocks.dtype)
            self.register_parameter(name, nn.Parameter(memory, requires_grad=False))

    @property
    def shape(self) -> torch.Size:
        """[N, K], whatever the tensors' shapes are."""
        return torch.Size((self.rows, self.columns))

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The quantiser's tensors."""
        return cast(dict[str, torch.Tensor], self._parameters)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """[T, K] → [T, N]."""
        return self.quantizer.linear(x, self.tensors, bias)

    def lookup(self, ids: torch.Tensor) -> torch.Tensor:
        """Some rows of the weight, dequantised: int[T] → [T, K]."""
        rows = {name: tensor.index_select(0, ids) for name, tensor in self.tensors.items()}
        return self.quantizer.dequantize(rows).to(self.dtype)

    def reorder_rows(self, order: torch.Tensor, within: int) -> None:
        """As `reorder_rows`, for an ``order`` that leaves each row among the ``within`` rows that it is one of.

        Raises `ConfigError` if these have more than one scale, or share theirs with a part of others.
        """
        for name, blocks in self.layout.items():
            if blocks.rows == 1:
                reorder_rows(self.tensors[name], order)
            elif blocks.rows % within:
                raise ConfigError(
                    f"quantization: this model's queries and keys are reordered in groups of {within} rows, and "
                    f"{blocks.rows} rows share a {name}; use 'none' or another scheme"
                )

    def prepack(self) -> QuantizedWeight:
        """A weight in the quantiser's fastest layout; this one stays as it is."""
        packed = copy(self)
        packed._parameters = {
            name: nn.Parameter(tensor, requires_grad=False)
            for name, tensor in self.quantizer.prepack(self.tensors).items()
        }
        return packed


def reorder_rows(tensor: torch.Tensor, order: torch.Tensor) -> None:
    """Put row ``order[i]`` of ``tensor`` in place i, in place; rows behind these stay."""
    rows = byte_view(tensor)
    rows[: len(order)] = rows[order.to(tensor.device)]


def check_device(option: str, dtypes: Iterable[torch.dtype], device: torch.device, remedy: str) -> None:
    """Raise `ConfigError`, which names ``option``, if this GPU has no 8-bit floats and one of ``dtypes`` is one."""
    if device.type != "cuda" or torch.float8_e4m3fn not in dtypes:
        return
    if (capability := torch.cuda.get_device_capability(device)) < _FP8_CAPABILITY:
        needed, found = (".".join(map(str, version)) for version in (_FP8_CAPABILITY, capability))
        raise ConfigError(
            f"{option}: 'fp8' needs a GPU of compute capability {needed} or later, this has {found}; use {remedy}"
        )


def check_blocks(name: str, layout: Mapping[str, Blocks], rows: Shard, columns: Shard, remedy: str) -> None:
    """Raise `ConfigError` if a rank's, or a merged projection's, part of the weight ``name`` cuts through a block."""
    for tensor, blocks in layout.items():
        for what, shard, size in (("rows", rows, blocks.rows), ("columns", columns, blocks.columns or 1)):
            for border in (shard.start, shard.stop):
                if border % size and border < shard.total:
                    raise ConfigError(
                        f"quantization: {what} {shard.start} to {shard.stop} of {name} cut through the blocks of "
                        f"{size} that share a {tensor}; use {remedy}"
                    )
