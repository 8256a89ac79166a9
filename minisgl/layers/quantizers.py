"""The schemes: 8-bit floats, 8-bit integers, and 4-bit integers in groups. Each is a twin of its kernels, too.

All are linear: ``weight ≈ scale × (number − zero)``, with a scale for each block of the weight and, at most, a zero
point beside it. On the CPU the products are plain PyTorch: they dequantise and multiply, or add up integers, which is
exact. On CUDA, `minisgl.kernels.quantized_linear` reads the small numbers and dequantises in registers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from minisgl.errors import ConfigError
from minisgl.layers.quantization import Blocks, QuantizedWeight, Quantizer, Tensors

FP8_MAX = 448.0
"""The largest number of e4m3 (Micikevicius et al. 2022): 1.75 × 2⁸."""
GROUP_SIZES = (128, 64, 32)
"""Weights that share a scale in int4: the first of these that divides a row."""

# With so few tokens a product waits for its weights, and quantised activations would gain nothing.
WEIGHT_ONLY_TOKENS = 16
_TINY = 1e-12
# Without these, oneDNN adds up products of int8 in 16 bits, which overflow, and takes ten times as long as float32.
_INT8_PRODUCTS = torch.backends.mkldnn.is_available() and (
    torch.cpu._is_vnni_supported() or torch.cpu._is_amx_tile_supported()
)
# Its product with weights in its own layout is made for AMX. Without, as on an EPYC, it multiplies one number after the
# other, a thousand times slower than `torch._int_mm`.
_PREPACKED_INT8 = _INT8_PRODUCTS and torch.cpu._is_amx_tile_supported()
_INT8_VECTOR = 64  # `torch._weight_int8pack_mm` reads beyond the end of rows that do not fill its registers


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """Inputs of a product in e4m3, each row with its own scale.

    `Fp8` rounds them itself if there are many tokens. A fused layer before it may have done so already.
    """

    numbers: torch.Tensor  # e4m3[T, K]
    scale: torch.Tensor  # float32[T, 1]

    def __len__(self) -> int:
        return len(self.numbers)

    def multiply(self, tensors: Tensors, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """``x Wᵀ + b`` in ``dtype``, [T, N], with what `Fp8` stores in place of the weight."""
        weight, weight_scale = tensors["weight"], tensors["weight_scale"]
        if self.numbers.is_cuda:
            from minisgl.kernels.quantized_linear import rounded_linear

            return rounded_linear(self.numbers, self.scale, weight, weight_scale, bias).to(dtype)
        return _add_bias((self.numbers.float() @ (weight.float() * weight_scale).T) * self.scale, bias).to(dtype)


def takes_rounded_rows(weight: torch.Tensor | QuantizedWeight) -> bool:
    """Whether products of more than `WEIGHT_ONLY_TOKENS` rows with this weight round them, and may get `RoundedRows`.

    The rows and columns of a weight whose product is ``torch._scaled_mm`` are multiples of 16. A class derived from
    `Fp8` may multiply in another way, so it gets the rows themselves.
    """
    is_fp8 = isinstance(weight, QuantizedWeight) and type(weight.quantizer) is Fp8
    return is_fp8 and all(size % 16 == 0 for size in weight.shape)


class Fp8(Quantizer):
    """Weights in e4m3, with a scale for each row; activations too, with one for each token, if there are many tokens.

    Twin of the product with many tokens: ``torch._scaled_mm`` with row-wise scales.
    """

    quantizes_embeddings = False
    quantizes_activations = True
    block = (1, 0)

    def layout(self, columns: int) -> dict[str, Blocks]:
        return {
            "weight": Blocks(1, 1, torch.float8_e4m3fn),
            "weight_scale": Blocks(*self.block, torch.float32),
        }

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        rows, columns = weight.shape
        block_rows, block_columns = self.block[0], self.block[1] or columns
        # Pad to whole blocks; zeros never are a block's largest number.
        padded = F.pad(weight.float(), (0, -columns % block_columns, 0, -rows % block_rows))
        blocks = padded.view(len(padded) // block_rows, block_rows, -1, block_columns)
        scale = blocks.abs().amax(dim=(1, 3)).clamp_(min=_TINY) / FP8_MAX
        numbers = (blocks / scale[:, None, :, None]).reshape(padded.shape)[:rows, :columns]
        return {"weight": to_fp8(numbers), "weight_scale": scale}

    def dequantize(self, tensors: Tensors) -> torch.Tensor:
        weight = tensors["weight"]
        return weight.float() * self._spread(tensors["weight_scale"], *weight.shape)

    def _spread(self, scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """One scale for each weight, or one that broadcasts over a row."""
        block_rows, block_columns = self.block
        if block_rows > 1:
            scale = scale.repeat_interleave(block_rows, 0)[:rows]
        if block_columns:
            scale = scale.repeat_interleave(block_columns, 1)[:, :columns]
        return scale

    def linear(self, x: torch.Tensor, tensors: Tensors, bias: torch.Tensor | None) -> torch.Tensor:
        many = self.quantizes_activations and len(x) > WEIGHT_ONLY_TOKENS
        if x.is_cuda:
            from minisgl.kernels.quantized_linear import fp8_linear

            return fp8_linear(x, tensors["weight"], tensors["weight_scale"], self.block, bias, many)
        if many:
            scale = x.abs().amax(dim=-1, keepdim=True).float().clamp_(min=_TINY) / FP8_MAX
            return RoundedRows(to_fp8(x.float() / scale), scale).multiply(tensors, bias, x.dtype)
        return F.linear(x, self.dequantize(tensors).to(x.dtype), bias)

    def prepack(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        return dict(tensors)


class Fp8WeightOnly(Fp8):
    """e4m3 weights, and activations as they are: for checkpoints that ask for it."""

    quantizes_activations = False


class Fp8Block(Fp8):
    """e4m3 weights with a scale for each block of 128 × 128, as DeepSeek-V3 (2024) and Qwen publish them.

    Activations stay as they are, however many tokens there are: products read fewer bytes, and compute in the model's
    dtype. The checkpoints declare ``activation_scheme: dynamic``: fp8, with a scale for each token and 128 columns. We
    accept that, and are more precise, and with many tokens slower.
    """

    quantizes_activations = False  # a token's scale would have to change every 128 columns
    block = (128, 128)

    def __init__(self, block: tuple[int, int] = (128, 128)) -> None:
        self.block = block


class Int8(Quantizer):
    """Weights in int8 with a scale for each row. Meant for the CPU.

    With VNNI or AMX instructions, activations become int8 too, with a scale for each token, and oneDNN adds up
    integers. Other CPUs multiply by floats: few tokens by PyTorch's weight-only product, which computes in bfloat16,
    many by the dequantised weight. `group_size` is for Q8_0 of GGUF, with a scale for every 32 weights of a row: then
    activations stay as they are.
    """

    quantizes_embeddings = True

    def __init__(self, group_size: int = 0) -> None:
        self.group_size = group_size
        self.quantizes_embeddings = not group_size

    def layout(self, columns: int) -> dict[str, Blocks]:
        if self.group_size and columns % self.group_size:
            raise _no_group(columns, (self.group_size,))
        return {"weight": Blocks(1, 1, torch.int8), "weight_scale": Blocks(1, self.group_size, torch.float32)}

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        groups = weight.float().unflatten(1, (-1, self.group_size or weight.shape[1]))
        scale = groups.abs().amax(dim=2).clamp_(min=_TINY) / 127.0
        return {"weight": (groups / scale[:, :, None]).round_().to(torch.int8).flatten(1), "weight_scale": scale}

    def dequantize(self, tensors: Tensors) -> torch.Tensor:
        scale = tensors["weight_scale"]
        weight = tensors["weight"].float()
        return (weight.view(len(weight), scale.shape[1], -1) * scale[:, :, None]).flatten(1)

    def linear(self, x: torch.Tensor, tensors: Tensors, bias: torch.Tensor | None) -> torch.Tensor:
        weight, weight_scale = tensors["weight"], tensors["weight_scale"]
        if x.is_cuda:
            from minisgl.kernels.quantized_linear import int8_linear

            return int8_linear(x, weight, weight_scale, self.group_size, bias)
        if not _INT8_PRODUCTS and self._has_few(x):
            ones = torch.ones(len(weight), dtype=torch.bfloat16)  # scales stay float32
            out = torch._weight_int8pack_mm(x.bfloat16(), weight, ones).float()
            return _add_bias(out.mul_(weight_scale.T), bias).to(x.dtype)
        if self.group_size or not _INT8_PRODUCTS:
            return F.linear(x, self.dequantize(tensors).to(x.dtype), bias)
        scale = x.abs().amax(dim=-1, keepdim=True).float().clamp_(min=_TINY) / 127.0
        numbers = (x / scale).round_().to(torch.int8)
        if weight.is_mkldnn:
            out = _onednn_linear(numbers, weight, weight_scale, tensors["zeros"])
        else:
            out = _int_mm(numbers, weight) * weight_scale.T
        return _add_bias(out.mul_(scale), bias).to(x.dtype)

    def _has_few(self, x: torch.Tensor) -> bool:
        """Whether PyTorch's weight-only product can be used, and is the fastest."""
        return not self.group_size and 0 < len(x) <= WEIGHT_ONLY_TOKENS and x.shape[1] % _INT8_VECTOR == 0

    def prepack(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        weight = tensors["weight"]
        if self.group_size or weight.device.type != "cpu" or not _PREPACKED_INT8:
            return dict(tensors)
        packed = torch.ops.onednn.qlinear_prepack(weight, None)
        # Zero points of the rows, which the operator wants though all are 0.
        zeros = torch.zeros(len(weight), dtype=torch.int32)
        return {"weight": packed, "weight_scale": tensors["weight_scale"].flatten(), "zeros": zeros}


class Int4(Quantizer):
    """Weights in 4 bits with a scale, and at most a zero point, for each group of a row; activations as they are.

    Two numbers share a byte, as in GGUF: byte j of a group of g holds number j in its low half and j + g/2 in its high
    half. Numbers are 0 to 15; without zero points they stand for −8 to 7.

    Args:
        group_size: weights that share a scale; None is the first of `GROUP_SIZES` that divides a row, 0 a whole row.
    """

    quantizes_embeddings = False
    zero_points = False

    def __init__(self, group_size: int | None = None, zero_points: bool | None = None) -> None:
        self.group_size = group_size
        if zero_points is not None:
            self.zero_points = zero_points

    def layout(self, columns: int) -> dict[str, Blocks]:
        group = self._group(columns)
        layout = {"weight": Blocks(1, 2, torch.uint8), "weight_scale": Blocks(1, group, torch.float16)}
        return layout | ({"weight_zero": Blocks(1, group, torch.float16)} if self.zero_points else {})

    def _group(self, columns: int) -> int:
        sizes = GROUP_SIZES if self.group_size is None else (self.group_size or columns,)
        for size in sizes:
            if columns % size == 0 and size % 2 == 0:
                return size
        raise _no_group(columns, sizes)

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        groups = weight.float().unflatten(1, (-1, self._group(weight.shape[1])))
        least, most = groups.amin(dim=2).clamp_(max=0.0), groups.amax(dim=2).clamp_(min=0.0)
        if self.zero_points:
            scale = _half((most - least) / 15.0)
            zero = (-least / scale).round_().clamp_(0.0, 15.0)
        else:
            # The side that reaches further gets -8, which has no counterpart; so a scale may be negative.
            scale = _half(torch.where(most > -least, most, least) / -8.0)
            zero = torch.full_like(scale, 8.0)
        numbers = (groups / scale[:, :, None] + zero[:, :, None]).round_().clamp_(0.0, 15.0).to(torch.uint8)
        tensors = {"weight": pack_int4(numbers), "weight_scale": scale.half()}
        return tensors | ({"weight_zero": zero.half()} if self.zero_points else {})

    def dequantize(self, tensors: Tensors) -> torch.Tensor:
        scale = tensors["weight_scale"]
        numbers = unpack_int4(tensors["weight"], scale.shape[1]).float()
        zero = tensors["weight_zero"].float()[:, :, None] if "weight_zero" in tensors else 8.0
        return ((numbers - zero) * scale.float()[:, :, None]).flatten(1)

    def linear(self, x: torch.Tensor, tensors: Tensors, bias: torch.Tensor | None) -> torch.Tensor:
        if x.is_cuda:
            from minisgl.kernels.quantized_linear import int4_linear

            return int4_linear(x, tensors["weight"], tensors["weight_scale"], tensors.get("weight_zero"), bias)
        return F.linear(x, self.dequantize(tensors).to(x.dtype), bias)

    def prepack(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        return dict(tensors)


class Int4ZeroPoint(Int4):
    """`Int4` with zero points: a group's numbers reach from its least weight to its largest."""

    zero_points = True


# -- numbers -----------------------------------------------------------------------------------------------------------


def to_fp8(x: torch.Tensor) -> torch.Tensor:
    """Round to e4m3; what is too large becomes the largest number, not NaN."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def pack_int4(numbers: torch.Tensor) -> torch.Tensor:
    """uint8[N, groups, g] of 0 to 15 → uint8[N, groups × g / 2]."""
    low, high = numbers.chunk(2, dim=2)
    return (low | (high << 4)).flatten(1)


def unpack_int4(packed: torch.Tensor, groups: int) -> torch.Tensor:
    """The reverse of `pack_int4`."""
    pairs = packed.unflatten(1, (groups, -1))
    return torch.cat([pairs & 15, pairs >> 4], dim=2)


def _half(scale: torch.Tensor) -> torch.Tensor:
    """Round to float16, as the scale is stored, and never to zero, since it divides."""
    tiny = torch.finfo(torch.float16).smallest_normal / 1024
    rounded = scale.half().float()
    return torch.where(rounded.abs() < tiny, tiny, rounded)


def _no_group(columns: int, sizes: tuple[int, ...]) -> ConfigError:
    return ConfigError(
        f"quantization: rows of {columns} weights cannot be divided into groups of {' or '.join(map(str, sizes))}; "
        "use 'fp8' or 'int8'"
    )


def _add_bias(out: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return out if bias is None else out.add_(bias)


def _int_mm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """int8[T, K] and int8[N, K] → int32[T, N], exact."""
    if not len(x):  # `torch._int_mm` refuses empty inputs
        return torch.zeros((0, len(weight)), dtype=torch.int32)
    return torch._int_mm(x, weight.T)


def _onednn_linear(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, zeros: torch.Tensor
) -> torch.Tensor:
    """The product of `_int_mm`, times the rows' scales, in one oneDNN call: float32[T, N]."""
    out: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
        x, 1.0, 0, weight, weight_scale, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return out
