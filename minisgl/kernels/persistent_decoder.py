"""All layers of a decoder for a single token in one kernel, whose blocks stay from the first product to the last.

A layer is five instructions (`OPERATIONS`). Every program, a block of the kernel, goes through the same list, and does
its share of each. Weights depend on no instruction, so they're fetched as far ahead as there is shared memory. Known as
a megakernel (Hazy Research's for Llama-1B, 2025; Mirage's MPK, Cheng et al. 2025). The tags in the vectors that blocks
tell each other are those of NCCL's LL protocol.

The kernel is persistent_decoder.cu, CUDA C++; `Interpreter` does the same in Python, where one can watch.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from minisgl.errors import ConfigError
from minisgl.kernels.nvrtc import CudaKernel, matrix_map, most_shared_memory, source_of

OPERATIONS = ("qkv_proj", "attention", "o_proj", "gate_up_proj", "down_proj")
"""Instructions of a layer, in order. The first and the fourth begin with the norm, the third and the fifth end with the
residual addition; attention is QK-norm, rotation, KV store and attention itself, merged."""

CLUSTER = 8
"""Blocks that write to each other's shared memory; the most that every GPU allows. A KV head has one cluster."""

_ROWS, _COLUMNS = 8, 1024  # of a weight that are fetched as one: a stage
_FEWEST_STAGES = 4
_STAGES_ON_THEIR_WAY = 2  # more would only make other requests wait
_SHARED_MEMORY = 227 << 10  # that a block may have on Hopper and Blackwell
_WARPS = 8  # that compute; one more fetches
_THREADS = 32 * (_WARPS + 1)
_FULL_SHARE = 2  # rows of a block without a KV head, for each row of a block with one, of all weights but the first


class LayerTensors(NamedTuple):
    """What a layer reads and writes; None where it has no such weight."""

    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    o: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    cos_sin: torch.Tensor  # float32[positions, head_dim], `Rotary.table`
    k_cache: torch.Tensor  # [pages, page_size, kv_heads, head_dim], as v_cache
    v_cache: torch.Tensor


class PersistentShape(NamedTuple):
    """Sizes that the kernel is compiled for."""

    layers: int
    hidden: int
    intermediate: int
    kv_heads: int
    group: int  # query heads of a KV head
    head_dim: int
    page_size: int
    window: int  # 0 for none
    qk_norm: bool
    qkv_bias: bool

    @property
    def attended(self) -> int:
        """Width of attention's output."""
        return self.kv_heads * self.group * self.head_dim

    @property
    def qkv(self) -> int:
        """Width of the packed projection."""
        return (self.group + 2) * self.kv_heads * self.head_dim

    @property
    def keys_of_a_stage(self) -> int:
        """Keys that take the room of a piece of a weight, with their values."""
        return _ROWS * _COLUMNS // (2 * self.head_dim)

    def stages(self, programs: int) -> int:
        """Pieces of weights for which a block has room in shared memory, beside what else it has there."""
        vectors = self.hidden + self.attended + self.intermediate
        small = 2 * (4 * self.hidden + 8 * self.head_dim) + 8 * len(LayerTensors._fields) * self.layers
        heads = self.group + 2
        attention = 8 * self.head_dim * heads + (8 + 4 * _WARPS) * self.group * (self.head_dim + 2)
        sums = 4 * _WARPS * _ROWS * self.most_tiles(programs)
        room = _SHARED_MEMORY - 2 * vectors - small - attention - sums - 1536  # barriers and alignment
        return max(0, room // (_ROWS * (2 * _COLUMNS + 16)))

    def most_tiles(self, programs: int) -> int:
        """Pieces of ``_ROWS`` rows in a program's share of the largest weight."""
        shares = _FULL_SHARE * programs - (_FULL_SHARE - 1) * self.kv_heads * CLUSTER
        gated = 2 * -(-_FULL_SHARE * self.intermediate // shares // _ROWS)
        return max(-(-(self.group + 2) * self.head_dim // CLUSTER // _ROWS), gated)

    def fits(self, programs: int) -> bool:
        """Whether the kernel can be compiled for it."""
        aligned = all(size % 32 == 0 and size >= 2 * programs for size in (self.hidden, self.intermediate))
        known = self.head_dim in (64, 128, 256) and self.kv_heads * CLUSTER <= programs
        return aligned and known and self.most_tiles(programs) <= 32 and self.stages(programs) >= _FEWEST_STAGES


class TokenStep(NamedTuple):
    """A step of one token."""

    slot: torch.Tensor  # int32[1] row in the page table
    seq_len: torch.Tensor  # int32[1] tokens with this one
    page_table: torch.Tensor  # int32[rows, pages]
    scale: float  # of attention
    eps: float  # of the norms of a layer
    head_eps: float  # of the norms of a head


class PersistentKernel:
    """The kernel for the current GPU, its table of addresses and its vectors; all in bfloat16.

    Args:
        shape: of every layer, which `PersistentShape.fits` the GPU's `most_programs`.
        layers: their tensors, which must stay where they are.

    Raises:
        ConfigError: keys and values have eight bits, or `cuda.bindings` are missing.
    """

    def __init__(self, shape: PersistentShape, layers: list[LayerTensors]) -> None:
        if layers[0].k_cache.dtype != torch.bfloat16:
            raise ConfigError("kv_dtype: the persistent decoder reads bfloat16; use the single-token decoder")
        self.shape = shape
        self._device = torch.cuda.current_device()
        self.programs = most_programs(self._device)
        self.stream = torch.empty_like(layers[0].input_norm)
        """Residual stream, [hidden]: before the first instruction, and after the last."""
        device = self.stream.device
        self._layers = layers  # kept alive: the kernel knows nothing but their addresses
        pointers = [[0 if each is None else each.data_ptr() for each in layer] for layer in layers]
        self._table = torch.tensor(pointers, dtype=torch.int64, device=device)
        piece = min(shape.page_size, shape.keys_of_a_stage)
        maps = [
            matrix_map(cache.flatten(0, 1).flatten(1), piece, shape.head_dim)
            for layer in layers
            for cache in (layer.k_cache, layer.v_cache)
        ]
        self._maps = torch.stack(maps).to(device)
        words = shape.attended + 2 * shape.hidden + shape.intermediate + 2
        self._words = torch.zeros(words, dtype=torch.int32, device=device)
        self._kernel = _compile(shape, self._device, timed=False)

    def run(self, step: TokenStep, times: torch.Tensor | None = None) -> None:
        """Carry out all instructions on `stream`, in one launch.

        ``times``, int64[instructions, programs, 3], gets the nanoseconds at which a program began an instruction, had
        what it reads, and was done.
        """
        arguments: list[torch.Tensor | int | float] = [
            self._table,
            self._maps,
            self.stream,
            self._words,
            step.slot,
            step.seq_len,
            step.page_table,
            step.page_table.stride(0),
            step.scale,
            step.eps,
            step.head_eps,
            self._words if times is None else times,
        ]
        kernel = self._kernel if times is None else _compile(self.shape, self._device, timed=True)
        kernel.launch_cooperatively(self.programs, arguments)


@cache
def most_programs(device: int) -> int:
    """How many blocks of the kernel fit on a GPU at the same time, in whole clusters; 0 if it has too little shared
    memory for one. Shared memory decides, of which a block takes all that a multiprocessor has."""
    with torch.cuda.device(device):
        if most_shared_memory(device) < _SHARED_MEMORY:
            return 0
        same_size = CudaKernel('extern "C" __global__ void probe() {}', "probe", {}, _THREADS, _SHARED_MEMORY)
        return same_size.clusters_at_once(CLUSTER) * CLUSTER


@cache
def _compile(shape: PersistentShape, device: int, timed: bool) -> CudaKernel:
    programs = most_programs(device)
    constants = {name.upper(): int(size) for name, size in shape._asdict().items()}
    constants |= {"PROGRAMS": programs, "CLUSTER": CLUSTER, "COLUMNS": _COLUMNS, "STAGES": shape.stages(programs)}
    constants |= {"FLIGHT": _STAGES_ON_THEIR_WAY, "FULL": _FULL_SHARE, "TIMED": int(timed)}
    source = source_of("persistent_decoder")
    return CudaKernel(source, "decode", constants, _THREADS, _SHARED_MEMORY)


class Interpreter:
    """The same list of instructions, carried out one by one with PyTorch, on any device and in any dtype."""

    def __init__(self, shape: PersistentShape, layers: list[LayerTensors], programs: int) -> None:
        self.shape, self.layers, self.programs = shape, layers, programs
        norm = layers[0].input_norm
        self.stream = torch.empty_like(norm)
        """Residual stream, [hidden]: before the first instruction, and after the last."""
        self.qkv, self.attended = norm.new_empty(shape.qkv), norm.new_empty(shape.attended)
        self.activated = norm.new_empty(shape.intermediate)
        self.splits = max(1, min(CLUSTER, programs // shape.kv_heads))

    def run(self, step: TokenStep) -> None:
        for number in range(len(OPERATIONS) * len(self.layers)):
            self.carry_out(number, step)

    def carry_out(self, number: int, step: TokenStep) -> None:
        """The instruction of that number: every program's share of it, in any order.

        No program of an instruction reads what another one of it writes; `attention` is two of them in this respect.
        """
        layer, operation = self.layers[number // len(OPERATIONS)], OPERATIONS[number % len(OPERATIONS)]
        stream = self.stream.clone()
        for program in range(self.programs):
            if operation == "qkv_proj":
                rows = self._share(self.shape.qkv, program)
                self.qkv[rows] = layer.qkv[rows] @ _norm(stream, layer.input_norm, step.eps)
                if layer.qkv_bias is not None:
                    self.qkv[rows] += layer.qkv_bias[rows]
            elif operation == "o_proj":
                rows = self._share(self.shape.hidden, program)
                self.stream[rows] += layer.o[rows] @ self.attended
            elif operation == "gate_up_proj":
                rows = self._share(self.shape.intermediate, program)
                x = _norm(stream, layer.post_norm, step.eps)
                gate, up = (half[rows] @ x for half in layer.gate_up.chunk(2))
                self.activated[rows] = torch.nn.functional.silu(gate) * up
            elif operation == "down_proj":
                rows = self._share(self.shape.hidden, program)
                self.stream[rows] += layer.down[rows] @ self.activated
        if operation == "attention":
            self._attend(layer, step)

    def _attend(self, layer: LayerTensors, step: TokenStep) -> None:
        """A program has a part of the keys of a KV head; then each head's parts are merged."""
        shape, position = self.shape, int(step.seq_len) - 1
        first = max(0, position + 1 - shape.window) if shape.window else 0
        splits = min(self.splits, max(1, -(-(position - first) // shape.keys_of_a_stage)))
        bounds = [first + (position - first) * split // splits for split in range(splits + 1)]
        bounds[-1] += 1  # the last has this token's own key too
        queries, keys, values = self.qkv.view(-1, shape.head_dim).split(
            [shape.kv_heads * shape.group, shape.kv_heads, shape.kv_heads]
        )
        cos, sin = layer.cos_sin[position].to(self.qkv.dtype).chunk(2)
        queries = _rotate(_norm(queries, layer.q_norm, step.head_eps), cos, sin)
        page, offset = divmod(position, shape.page_size)
        pages = step.page_table[int(step.slot)].long()
        layer.k_cache[pages[page], offset] = _rotate(_norm(keys, layer.k_norm, step.head_eps), cos, sin)
        layer.v_cache[pages[page], offset] = values
        parts: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {head: [] for head in range(shape.kv_heads)}
        for program in range(shape.kv_heads * splits):
            head, split = program // splits, program % splits
            places = torch.arange(bounds[split], bounds[split + 1])
            at = pages[places // shape.page_size], places % shape.page_size
            group = queries[head * shape.group : (head + 1) * shape.group]
            scores = group @ layer.k_cache[at][:, head].T * step.scale
            lse = scores.logsumexp(dim=1, keepdim=True)
            parts[head].append(((scores - lse).exp() @ layer.v_cache[at][:, head], lse))
        merged = self.attended.view(shape.kv_heads, shape.group, shape.head_dim)
        for head, seen in parts.items():
            weights = torch.stack([lse for _, lse in seen]).softmax(dim=0)
            merged[head] = (torch.stack([out for out, _ in seen]) * weights).sum(dim=0)

    def _share(self, rows: int, program: int) -> slice:
        return slice(rows * program // self.programs, rows * (program + 1) // self.programs)


def _norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    return x if weight is None else torch.nn.functional.rms_norm(x, weight.shape, weight, eps)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
