"""The emulation of CUDA C++ that tests of kernels use: known answers, and what it must notice."""

from __future__ import annotations

import re

import pytest
import torch

from minisgl.errors import ConfigError
from tests.kernels.emulated import EmulatedKernel

ASM = 'asm("{instruction} {{%0}}, {{%1}};" : "+r"(c[0]) : "r"(a0));'
PARAMETERS = "(&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1"
# A warp multiplies [16, K] and the transpose of [8, K]; rows have WORDS words.
MULTIPLY = """
__device__ void {name}({type} {parameters}) {{ {asm} }}
extern "C" __global__ void product(const unsigned* a, const unsigned* b, {type}* out) {{
    int row = threadIdx.x / 4, word = threadIdx.x % 4;
    {type} c[4];
    for (int i = 0; i < 4; i++) c[i] = out[(row + i / 2 * 8) * 8 + 2 * word + i % 2];
    const unsigned* upper = a + row * WORDS + word;
    {name}(c, upper[0], upper[8 * WORDS], upper[4], upper[8 * WORDS + 4], b[row * WORDS + word],
           b[row * WORDS + word + 4]);
    for (int i = 0; i < 4; i++) out[(row + i / 2 * 8) * 8 + 2 * word + i % 2] = c[i];
}}
"""


def kernel(
    body: str, parameters: str, functions: str = "", threads: int = 64, shared_memory: int = 0
) -> EmulatedKernel:
    text = f'{functions}\nextern "C" __global__ void __launch_bounds__(THREADS) test({parameters}) {{\n{body}\n}}\n'
    return EmulatedKernel(text, "test", {"THREADS": threads}, threads, shared_memory)


def integers(low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def product(name: str, instruction: str, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    text = MULTIPLY.format(
        name=name,
        type="float" if c.dtype == torch.float32 else "int",
        parameters=PARAMETERS,
        asm=ASM.format(instruction=instruction),
    )
    out = c.clone()
    EmulatedKernel(text, "product", {"WORDS": 8}, 32, 0).launch(1, [a, b, out])
    return out


@pytest.mark.parametrize(
    ("name", "kind", "dtype"),
    [("multiply_halves", "f16", torch.float16), ("multiply_matrices", "bf16", torch.bfloat16)],
)
def test_products_of_floats(name: str, kind: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, 16, generator=generator).to(dtype) for rows in (16, 8))
    c = torch.randn(16, 8, generator=generator)
    out = product(name, f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32", a, b, c)
    torch.testing.assert_close(out.double(), a.double() @ b.double().T + c.double(), rtol=1e-6, atol=1e-6)


def test_products_of_bytes() -> None:
    a, b = (integers(-128, 128, rows, 32, dtype=torch.int8) for rows in (16, 8))
    c = integers(-1000, 1000, 16, 8)
    out = product("multiply_bytes", "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32", a, b, c)
    assert torch.equal(out, (a.long() @ b.long().T + c).int())


def test_a_warp_exchanges_values() -> None:
    """Twice in a row, so that a lane may be ahead of others by one exchange."""
    body = """
    int i = threadIdx.x, value = from[i];
    int other = __shfl_xor_sync(~0u, value, 5) - __shfl_xor_sync(~0u, 2 * value, 16);
    out[i] = other;
    out[THREADS + i] = __reduce_max_sync(~0u, (unsigned)value);
    out[2 * THREADS + i] = __reduce_add_sync(~0u, value);"""
    values, out = integers(0, 1000, 64), torch.zeros(3, 64, dtype=torch.int32)
    kernel(body, "const int* from, int* out").launch(1, [values, out])
    lanes = torch.arange(64)
    assert torch.equal(out[0], values[lanes ^ 5] - 2 * values[lanes ^ 16])
    assert torch.equal(out[1], values.view(2, 32).amax(1).repeat_interleave(32))
    assert torch.equal(out[2], values.view(2, 32).sum(1).int().repeat_interleave(32))


FUNCTIONS = {
    "scale_of": ("float", "unsigned short half", "cvt.f32.f16"),
    "pair": ("unsigned", "float first, float second", "cvt.rn.bf16x2.f32"),
    "halves": ("unsigned", "float first, float second", "cvt.rn.f16x2.f32"),
    "lower_halves": ("unsigned", "unsigned word", "cvt.rn.f16x2.e4m3x2"),
    "upper_halves": ("unsigned", "unsigned word", "cvt.rn.f16x2.e4m3x2"),
    "less_8": ("unsigned", "unsigned bytes", "lop3.b32 0xf0f0f0f0 0x80808080 0x6a"),
    "larger": ("float", "float first, float second", "max.NaN.f32"),
    "multiply_add": ("unsigned", "unsigned a, unsigned b, unsigned c", "fma.rn.bf16x2"),
}


def evaluate(name: str, call: str, inputs: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    kind, parameters, instruction = FUNCTIONS[name]
    function = f'__device__ {kind} {name}({parameters}) {{\n    asm volatile("{instruction} %0;" : "=r"(x));\n}}'
    element = {torch.float32: "float", torch.int16: "unsigned short", torch.int32: "unsigned"}[inputs.dtype]
    kind = "float" if out.dtype == torch.float32 else "unsigned"
    body = f"for (int i = threadIdx.x; i < count; i += THREADS) out[i] = {call};"
    kernel(body, f"const {element}* x, {kind}* out, int count", function).launch(1, [inputs, out, len(out)])
    return out


def test_numbers_of_other_formats() -> None:
    """All of float16 and e4m3; float32 at, beside and between numbers of 16 bits, the smallest and largest too."""
    every = torch.arange(1 << 16, dtype=torch.int32)
    bits = every.to(torch.int16)
    floats = evaluate("scale_of", "scale_of(x[i])", bits, torch.zeros(1 << 16))
    torch.testing.assert_close(floats, bits.view(torch.float16).float(), rtol=0, atol=0, equal_nan=True)

    for name, dtype in (("pair", torch.bfloat16), ("halves", torch.float16)):
        near = bits.view(dtype).float().view(torch.int32)[:, None]
        half = 1 << 15 if dtype == torch.bfloat16 else 1 << 12
        steps = torch.tensor([0, 1, half - 1, half, half + 1], dtype=torch.int32)
        numbers = (near + steps).view(torch.float32).flatten().contiguous()
        numbers = torch.cat([numbers, torch.tensor([1e-30, -1e-8, 2e-8, 3e-8, 9e-8, 1e38, 65519.0, 65520.0])])
        out = evaluate(name, f"{name}(x[i], -x[i])", numbers, torch.zeros(len(numbers), dtype=torch.int32))
        halves = out.view(dtype).view(-1, 2).float()
        expected = torch.stack([numbers, -numbers], 1).to(dtype).float()
        torch.testing.assert_close(halves, expected, rtol=0, atol=0, equal_nan=True)

    words = every | (every.flip(0) << 16)
    for name, at in (("lower_halves", 0), ("upper_halves", 2)):
        out = evaluate(name, f"{name}(x[i])", words, torch.zeros(1 << 16, dtype=torch.int32))
        expected = words.view(torch.uint8).view(-1, 4)[:, at : at + 2].contiguous().view(torch.float8_e4m3fn).float()
        torch.testing.assert_close(
            out.view(torch.float16).view(-1, 2).float(), expected, rtol=0, atol=0, equal_nan=True
        )


def test_a_fused_multiplication_rounds_once() -> None:
    """1.0078125² − 1 − 2⁻⁶ is 2⁻¹⁴, of which nothing is left if the square is rounded."""
    words = torch.tensor([1.0078125, 3.0, -1.015625, -2.0]).bfloat16().view(torch.int32)
    call = "multiply_add(x[0], x[0], x[1])"
    out = evaluate("multiply_add", call, words, torch.zeros(1, dtype=torch.int32))
    assert out.view(torch.bfloat16).tolist() == [2.0**-14, 7.0]


def test_the_larger_of_two_numbers() -> None:
    numbers = torch.tensor([-1.0, 2.0, torch.nan, 3.0])
    out = evaluate("larger", "larger(x[i], x[(i + 1) % 4])", numbers, torch.zeros(4))
    torch.testing.assert_close(out, torch.tensor([2.0, torch.nan, torch.nan, 3.0]), equal_nan=True)


def test_bytes_with_a_sign() -> None:
    """16 (q - 8) of the upper four bits q of all bytes; the lower four don't count."""
    every = torch.arange(256, dtype=torch.uint8).repeat(4)
    out = evaluate("less_8", "less_8(x[i])", every.view(torch.int32), torch.zeros(256, dtype=torch.int32))
    assert torch.equal(out.view(torch.int8).int(), 16 * (every.int() // 16 - 8))


def test_memory_that_a_block_shares() -> None:
    """Static and dynamic, seen by all threads behind a barrier, and full of NaN when a block starts."""
    body = """
    __shared__ alignas(16) float fixed[THREADS];
    extern __shared__ __align__(16) float memory[];
    int other = (threadIdx.x + 40) % THREADS;
    bool fresh = fixed[other] != fixed[other] && memory[other] != memory[other];
    __syncthreads();
    fixed[threadIdx.x] = threadIdx.x;
    memory[threadIdx.x] = fresh ? factor : 0;
    __syncthreads();
    out[blockIdx.x * blockDim.x + threadIdx.x] = fixed[other] * memory[other];"""
    out = torch.zeros(3, 64)
    kernel(body, "float* out, float factor", shared_memory=256).launch(3, [out, 0.5])
    assert torch.equal(out, ((torch.arange(64) + 40) % 64 * 0.5).expand(3, 64))


def test_a_missing_barrier_shows() -> None:
    """Threads go on in an order that is reversed in every second block."""
    body = """
    __shared__ float values[THREADS];
    values[threadIdx.x] = 1;
    out[blockIdx.x * THREADS + threadIdx.x] = values[{other}];"""
    for other in ("0", "THREADS - 1"):
        out = torch.zeros(2, 64)
        kernel(body.format(other=other), "float* out").launch(2, [out])
        assert out.isnan().any()


READ_ONCE = """
__device__ uint4 read_once(const char* from) {
    uint4 words;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0}, [%1];" : "=r"(words.x) : "l"(from));
    return words;
}"""


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "if (threadIdx.x != 3) __syncthreads();",
            "line 3, block 0, thread 0: deadlock: of 64 threads 1 have ended, 63 wait in __syncthreads of line 3",
        ),
        (
            "if (threadIdx.x < 32) __syncthreads();\nelse if (threadIdx.x > 40) __reduce_add_sync(~0u, 1);",
            "9 have ended, 23 wait in __reduce_add_sync of line 4, 32 wait in __syncthreads of line 3",
        ),
        (
            "if (threadIdx.x % 2) __shfl_xor_sync(~0u, 1, 1);\nelse __reduce_add_sync(~0u, 1);",
            "line 3, block 0, thread 1: __shfl_xor_sync, but thread 0 waits in __reduce_add_sync of line 4",
        ),
        ("__shfl_xor_sync(0xffffu, 1, 1);", "line 3, .*mask 0xffff; only whole warps"),
        ("\n*(uint2*)(out + 1) = {};", "line 4, .* isn't aligned"),
        ("read_once((const char*)(out + 2));", "line 3, .* which is no multiple of 16"),
        ("int few[4];\nfew[threadIdx.x] = 1;\nout[0] = few[1];", "line 4, .*thread 4: an array has no index 4"),
        (
            "extern __shared__ int memory[];\nmemory[threadIdx.x] = 1;",
            "the block wrote behind its dynamic shared memory",
        ),
    ],
)
def test_wrong_kernels_are_named(body: str, message: str) -> None:
    out = torch.zeros(64, dtype=torch.int32)
    test = kernel(body, "int* out", READ_ONCE.replace("\n", " "), shared_memory=252)
    for _ in range(2):  # a launch that failed leaves nothing behind
        with pytest.raises(RuntimeError, match=f"^test: .*{message}"):
            test.launch(1, [out])


def test_arguments_must_be_those_of_the_kernel() -> None:
    test = kernel("out[0] = number;", "float* out, float number")
    with pytest.raises(RuntimeError, match="the arguments are pi, the kernel's parameters pf"):
        test.launch(1, [torch.zeros(1), 1])


@pytest.mark.parametrize(
    ("functions", "body", "message"),
    [
        (
            '__device__ int lane_mask() { asm("mov.u32 %0, %lanemask_lt;"); }',
            "",
            "'lane_mask' has asm, and .* no function",
        ),
        ('__device__ float scale_of(unsigned short x) { asm("cvt.f32.bf16 %0, %1;"); }', "", "'scale_of' has asm"),
        ('__device__ u32 less_8(u32 x) { asm("lop3.b32 %0, %1, 0xf0f0f0f0, 0x80808080, 0x6b;"); }', "", "'less_8' has"),
        ("", 'asm volatile("bar.sync 0;");', "asm stands outside of __device__ functions"),
        ("", "out[0] = nothing;", re.escape("test.cu:3:") + r"(.|\n)*nothing"),
    ],
)
def test_text_that_cannot_be_emulated(functions: str, body: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kernel(body, "int* out", functions)


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"need a C\+\+ compiler and there is no no-such-compiler"):
        kernel("// compiled nowhere else", "int* out")
