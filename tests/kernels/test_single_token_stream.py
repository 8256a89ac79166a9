"""The kernel for one token and quantised weights, against float64 of the dequantised weight.

On a GPU, and emulated on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from minisgl.engine.cuda_graph import CudaGraphCapture
from minisgl.kernels import single_token_stream
from minisgl.layers.quantizers import Fp8, Int8
from tests.kernels.closeness import DEVICE, assert_close, random
from tests.kernels.emulated import EmulatedKernel
from tests.kernels.test_few_tokens import every_scheme, quantized

ON_GPU = DEVICE == "cuda"


@pytest.fixture(autouse=True)
def two_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without a GPU: an emulated one with so few that a block has several units of rows."""
    if not ON_GPU:
        monkeypatch.setattr(single_token_stream, "CudaKernel", EmulatedKernel)
        monkeypatch.setattr(single_token_stream, "_multiprocessors", lambda device: 2)
    single_token_stream._compile.cache_clear()
    yield
    single_token_stream._compile.cache_clear()


class OnGpu(torch.Tensor):
    """Says that it is on a GPU."""

    is_cuda = property(lambda self: True)  # type: ignore[assignment]


def test_what_it_leaves_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """All on a CPU; on a GPU other dtypes, more tokens, rows that are no whole piece, very wide ones, and int8."""
    x = random(512, dtype=torch.bfloat16)
    weight = Fp8().quantize(random(32, 512, dtype=torch.float32))["weight"]
    fits = single_token_stream.fits
    assert not fits(x.cpu(), weight, (1, 0))
    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(single_token_stream, "has_nvrtc", lambda: True)
    x = x.as_subclass(OnGpu)
    assert fits(x, weight, (1, 0))
    assert fits(x[None], weight, (1, 0))
    assert fits(x, weight, (128, 128))
    assert not fits(x.float(), weight, (1, 0))
    assert not fits(torch.stack([x, x]), weight, (1, 0))
    assert not fits(x, weight[:28], (1, 0))
    assert not fits(x[:448], weight[:, :448].contiguous(), (1, 0))
    assert not fits(x, weight, (1, 64))
    assert fits(x, torch.empty(32, 256, dtype=torch.uint8), (1, 128))
    assert not fits(x[:384], torch.empty(32, 192, dtype=torch.uint8), (1, 128))
    assert not fits(x, Int8().quantize(random(32, 512, dtype=torch.float32))["weight"], (1, 0))
    wide = torch.empty(32, 28800, dtype=torch.float8_e4m3fn)
    assert fits(x.repeat(56), wide[:, :28672], (1, 0))
    assert not fits(x.repeat(57)[:28800], wide, (1, 0))
    capability = (8, 6)
    assert not fits(x, weight, (1, 0))


@pytest.mark.parametrize("columns", [256, 28672])
@pytest.mark.parametrize("rows", [8, 8000, 152064])
def test_a_block_has_room_on_every_gpu(rows: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that know e4m3 have at least 99 KB of shared memory for a block."""
    sizes: list[int] = []

    class Kernel:
        def __init__(self, source: str, name: str, constants: object, threads: int, shared_memory: int) -> None:
            sizes.append(shared_memory)

        def launch(self, blocks: int, arguments: object, early: bool) -> None:
            """What a block has is all that counts."""

    monkeypatch.setattr(single_token_stream, "CudaKernel", Kernel)
    x, out = (torch.empty(size, dtype=torch.bfloat16, device=DEVICE) for size in (columns, rows))
    weight = torch.empty(0, dtype=torch.float8_e4m3fn, device=DEVICE)
    single_token_stream.linear(x, weight, torch.empty(0, device=DEVICE), None, (1, 0), out)
    assert 0 < sizes[0] <= 99 << 10


SHAPES = [(16, 256), (56, 1280)] + ([(6160, 5120), (1024, 17408)] if ON_GPU else [])


@every_scheme
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_products_of_every_shape(name: str, rows: int, columns: int) -> None:
    tensors, weight, block = quantized(name, rows, columns)
    scale, zero = tensors["weight_scale"], tensors.get("weight_zero")
    x, bias = random(columns, dtype=torch.bfloat16), random(rows, dtype=torch.bfloat16, seed=2)
    out = torch.full((rows,), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    single_token_stream.linear(x, tensors["weight"], scale, zero, block, out, bias=bias)
    assert_close(out, F.linear(x.double(), weight, bias.double()), torch.bfloat16)


def test_more_rows_than_blocks_have_room_for_at_once() -> None:
    """As a vocabulary has; blocks then come one after the other."""
    multiprocessors = single_token_stream._multiprocessors(torch.device(DEVICE))
    rows = 8 * (single_token_stream._MOST_UNITS * multiprocessors + 1)
    tensors, weight, block = quantized("fp8", rows, 128)
    x = random(128, dtype=torch.bfloat16)
    out = torch.full((rows,), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    single_token_stream.linear(x, tensors["weight"], tensors["weight_scale"], None, block, out)
    assert_close(out, weight @ x.double(), torch.bfloat16)


@every_scheme
def test_no_less_precise_than_rounding_the_result(name: str) -> None:
    """Also where one column of x is a thousand times larger than others, as in real models."""
    rows, columns = 64, 1024
    tensors, weight, block = quantized(name, rows, columns)
    x = random(columns, dtype=torch.bfloat16)
    x[77] *= 1000
    out = torch.empty(rows, dtype=torch.bfloat16, device=DEVICE)
    single_token_stream.linear(x, tensors["weight"], tensors["weight_scale"], tensors.get("weight_zero"), block, out)
    expected = weight @ x.double()
    rounding = (expected.bfloat16().double() - expected).norm()
    assert float((out.double() - expected).norm() / rounding) < 1.1


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
@pytest.mark.parametrize("name", ["fp8", "int4"])
def test_what_is_no_number_stays_none(name: str, value: float) -> None:
    """An x with NaN or an infinite number makes all outputs NaN."""
    tensors, _, block = quantized(name, 16, 512)
    x = random(512, dtype=torch.bfloat16)
    x[300] = value
    out = torch.zeros(16, dtype=torch.bfloat16, device=DEVICE)
    single_token_stream.linear(x, tensors["weight"], tensors["weight_scale"], None, block, out)
    assert bool(out.isnan().all())


@pytest.mark.parametrize("name", ["fp8", "int4"])
@pytest.mark.parametrize("value", [0.0, 1e-30, 1e30])
def test_the_largest_and_the_smallest_x(name: str, value: float) -> None:
    tensors, weight, block = quantized(name, 16, 256)
    x = torch.full((256,), value, dtype=torch.bfloat16, device=DEVICE)
    scale = tensors["weight_scale"] / 16  # so that results are numbers of bfloat16
    out = torch.full((16,), torch.nan, dtype=torch.bfloat16, device=DEVICE)
    single_token_stream.linear(x, tensors["weight"], scale, None, block, out)
    expected = weight / 16 @ x.double()
    torch.testing.assert_close(out.double(), expected, rtol=1e-2, atol=1e-33)


@every_scheme
def test_all_that_is_fused(name: str) -> None:
    """Two layers behind each other; on a GPU in a graph, where each is launched before the one in front has ended."""
    width = 1024 if ON_GPU else 256
    tensors, weight, block = quantized(name, 2 * width, width)
    gate_up = (tensors["weight"], tensors["weight_scale"], tensors.get("weight_zero"), block)
    down = tuple(None if each is None else each[: len(each) // 2] for each in gate_up[:3])
    x, norm = random(width, dtype=torch.bfloat16), 1.0 + random(width, dtype=torch.bfloat16, seed=3) / 4
    bias = random(2 * width, dtype=torch.bfloat16, seed=4)
    stream, hidden = x.clone(), torch.empty_like(x)

    def layer() -> tuple[torch.Tensor, ...]:
        single_token_stream.linear(stream, *gate_up, hidden, bias=bias, norm=norm, eps=1e-5, gated=True)
        single_token_stream.linear(hidden, *down, block, stream, bias=bias[:width], residual=stream)
        return stream, hidden

    replay: Any = CudaGraphCapture(torch.device(DEVICE))(layer).replay if ON_GPU else layer
    for _ in range(20 if ON_GPU else 1):
        stream.copy_(x)
        replay()
        replay()
        expected = x.double()
        for _ in range(2):
            gate, up = (weight @ F.rms_norm(expected, (width,), norm.double(), 1e-5) + bias.double()).chunk(2)
            inner = F.silu(gate) * up
            expected = weight[:width] @ inner + bias[:width].double() + expected
        assert float((hidden.double() - inner).norm() / inner.norm()) < 0.02
        assert float((stream.double() - expected).norm() / expected.norm()) < 0.02
