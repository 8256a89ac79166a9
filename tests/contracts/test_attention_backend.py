"""What every attention backend must do, one behaviour a test. Random steps: `test_attention_backend_random`.

All results are compared with a loop over tokens in float64, in memory that holds NaN wherever nothing was written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from minisgl.attention.select import ATTENTION_BACKENDS
from minisgl.context import AttentionBackend, AttentionSpec
from minisgl.registry import resolve
from tests.attention import PagedSequences

CONTRACTS = {"paged": (ATTENTION_BACKENDS, AttentionBackend)}
PAGE_SIZES = [1, 4, 16, 64]

Paged = Callable[..., PagedSequences]


@dataclass(frozen=True)
class Abilities:
    """What a backend is graded with if it cannot compute everything that the reference can.

    Args:
        dtype: of queries, keys and values, where the test names none.
        head_dims: the widths of heads that it has, ascending; the test's are widened to the next.
    """

    dtype: torch.dtype = torch.float32
    head_dims: Sequence[int] = (8, 64, 80)


FLASHINFER_NAMES = ("flashinfer", "flashinfer-fa2", "flashinfer-fa3")
ABILITIES = dict.fromkeys(FLASHINFER_NAMES, Abilities(torch.bfloat16, (64, 128)))
INTERPRETED = ("cascade", "triton")
MARKS = {name: [pytest.mark.gpu, pytest.mark.needs("flashinfer")] for name in ABILITIES}


def paged_for(name: str) -> Paged:
    """Makes `PagedSequences` over a backend: the layers, the lengths, and what else there is to choose."""
    make_backend, abilities = resolve("--impl", name, ATTENTION_BACKENDS), ABILITIES.get(name, Abilities())
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def make(specs: Sequence[AttentionSpec], *args: Any, **options: Any) -> PagedSequences:
        widths = [next(width for width in abilities.head_dims if width >= spec.head_dim) for spec in specs]
        specs = [replace(spec, head_dim=width) for spec, width in zip(specs, widths, strict=True)]
        return PagedSequences(make_backend, device, specs, *args, **{"dtype": abilities.dtype, **options})

    return make


def layers(
    *windows: int | None, heads: int = 4, kv_heads: int = 2, head_dim: int = 8, scale: float = 0.3
) -> list[AttentionSpec]:
    """One layer for each window."""
    return [AttentionSpec(i, heads, kv_heads, head_dim, scale, window) for i, window in enumerate(windows)]


TWO_LAYERS = layers(None, None)


def run_mixed_steps(sequences: PagedSequences) -> None:
    """Four steps over six sequences of 40 tokens: decode rows, and prompts that are new, in chunks or half cached."""
    sequences.fill([17, 1, 39, 0, 0, 8])
    sequences.run({0: 1, 1: 1, 2: 1, 3: 40, 4: 5, 5: 32})
    sequences.run({0: 1, 1: 1, 4: 11})
    sequences.run({1: 1, 0: 1})
    sequences.run({4: 24, 0: 20})


MIXED = [40] * 6


@pytest.fixture
def paged(request: pytest.FixtureRequest) -> Paged:
    return paged_for(request.param)


@pytest.fixture(params=PAGE_SIZES)
def page_size(request: pytest.FixtureRequest) -> int:
    return int(request.param)


# -- every kind of step --------------------------------------------------------------------------------------------


def test_whole_prompts(paged: Paged, page_size: int) -> None:
    paged(TWO_LAYERS, [5, 1, 17, 64], page_size).run({0: 5, 1: 1, 2: 17, 3: 64})


def test_prompts_of_very_different_lengths(paged: Paged, page_size: int) -> None:
    paged(layers(None), [1, 300, 2, 70], page_size).run({0: 1, 1: 300, 2: 2, 3: 70})


@pytest.mark.parametrize("cached", [0, 1, 2, 3])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_prompts_of_all_lengths(paged: Paged, kv_heads: int, cached: int) -> None:
    """Among these lengths and prefixes are all the alignments of memory at which kernels take another path or fail."""
    lengths = [cached + length for length in range(1, 34)] + [40]
    sequences = paged(layers(None, kv_heads=kv_heads), lengths)
    sequences.fill([cached] * len(lengths))
    sequences.run({row: length - cached for row, length in enumerate(lengths)}, num_decode=0)


def test_decode_rows_of_very_different_lengths(paged: Paged, page_size: int) -> None:
    sequences = paged(TWO_LAYERS, [2, 2000, 4, 41, 701, 65], page_size)
    sequences.fill([1, 1999, 3, 40, 700, 64])
    sequences.run(dict.fromkeys(range(6), 1))


@pytest.mark.interpreted
def test_prefill_behind_a_cached_prefix(paged: Paged, page_size: int) -> None:
    sequences = paged(TWO_LAYERS, [13, 23, 90, 38], page_size)
    sequences.fill([8, 3, 64, 37])
    sequences.run({0: 5, 1: 20, 2: 26, 3: 1}, num_decode=0)


def test_a_prompt_in_chunks(paged: Paged, page_size: int) -> None:
    sequences = paged(TWO_LAYERS, [40, 23], page_size)
    for first, second in ((7, 1), (16, 4), (1, 16), (15, 1), (1, 1)):
        sequences.run({0: first, 1: second}, num_decode=0)


def test_decode_rows(paged: Paged, page_size: int) -> None:
    sequences = paged(TWO_LAYERS, [24, 22, 70], page_size)
    sequences.fill([18, 16, 60])
    for _ in range(6):  # over the borders of pages
        sequences.run({0: 1, 1: 1, 2: 1})


def test_mixed_steps(paged: Paged, page_size: int) -> None:
    run_mixed_steps(paged(TWO_LAYERS, MIXED, page_size))


# -- pages ---------------------------------------------------------------------------------------------------------


@pytest.mark.interpreted
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, 1e30])
def test_what_was_never_written_does_not_leak(paged: Paged, page_size: int, garbage: float) -> None:
    sequences = paged(layers(None, 7), [9, 30, 67], page_size, garbage=garbage)
    sequences.fill([5, 20, 65])
    sequences.run({0: 1, 2: 1, 1: 6})


@pytest.mark.parametrize("seed", range(1, 5))
def test_the_order_of_pages_and_slots_does_not_matter(paged: Paged, seed: int) -> None:
    run_mixed_steps(paged(TWO_LAYERS, MIXED, seed=seed))


@pytest.mark.interpreted
def test_rows_share_pages(paged: Paged, page_size: int) -> None:
    """Several rows with the same prefix in one step: they decode, continue it, or have it whole."""
    shared = 2 * page_size
    sequences = paged(TWO_LAYERS, [shared + 9] * 4, page_size)
    for row in (1, 2, 3):
        sequences.share(row, source=0, num_pages=2)
    sequences.fill([shared + 3, shared + 8, shared + 1, shared])
    sequences.run({0: 1, 1: 1, 2: 1, 3: 9})
    sequences.run({0: 1, 2: 1})


@pytest.mark.interpreted
@pytest.mark.parametrize("fed", [1, 5])
@pytest.mark.parametrize("reader_first", [True, False])
def test_a_row_reads_pages_that_another_row_of_the_step_writes(paged: Paged, reader_first: bool, fed: int) -> None:
    sequences = paged(TWO_LAYERS, [13, 11])
    sequences.share(0, source=1, num_pages=2)
    sequences.kv_lens[0] = 8  # of which nothing is in memory before the step
    sequences.run({0: fed, 1: 11} if reader_first else {1: 11, 0: fed})


def test_the_layers_of_a_step_keep_their_own_keys(paged: Paged) -> None:
    run_mixed_steps(paged(layers(None, None, 5, None, 5), MIXED))


def test_fed_keys_and_values_are_stored_and_nothing_else_changes(paged: Paged, page_size: int) -> None:
    sequences = paged(TWO_LAYERS, [20, 9, 30], page_size)
    sequences.fill([12, 0, 4])
    memory = (sequences.kv_cache.k, sequences.kv_cache.v)
    expected = [x.clone() for x in memory]
    step = sequences.step({0: 1, 1: 9, 2: 8})
    for layer, ((_, k, v), _) in enumerate(step.layers):
        expected[0][layer].flatten(0, 1)[step.inputs.out_locs] = k
        expected[1][layer].flatten(0, 1)[step.inputs.out_locs] = v
    sequences.outputs(step)
    for now, wanted in zip(memory, expected, strict=True):
        assert torch.equal(now.view(torch.int32), wanted.view(torch.int32)), "bit by bit, as NaN differs from itself"


# -- the layer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [8, 64, 80])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (7, 1), (1, 1)], ids=["MHA", "GQA", "MQA", "one"])
def test_heads(paged: Paged, heads: int, kv_heads: int, head_dim: int) -> None:
    specs = layers(None, heads=heads, kv_heads=kv_heads, head_dim=head_dim, scale=head_dim**-0.5)
    run_mixed_steps(paged(specs, MIXED))


@pytest.mark.parametrize("scale", [0.05, 1.5])
def test_the_scale_is_the_layers_own(paged: Paged, scale: float) -> None:
    run_mixed_steps(paged(layers(None, scale=scale), MIXED))


@pytest.mark.not_for(*FLASHINFER_NAMES)  # which refuse so small a scale
def test_a_scale_of_zero_averages(paged: Paged) -> None:
    run_mixed_steps(paged(layers(None, scale=0.0), MIXED))


@pytest.mark.parametrize("window", [1, 2, 4, 13, 40, 1000])
def test_a_token_sees_its_window(paged: Paged, page_size: int, window: int) -> None:
    run_mixed_steps(paged(layers(window), MIXED, page_size))


@pytest.mark.interpreted
@pytest.mark.parametrize("windows", [(3, None), (None, 3), (3, 9), (9, 3)])
def test_each_layer_has_its_window(paged: Paged, windows: tuple[int | None, int | None]) -> None:
    run_mixed_steps(paged(layers(*windows), MIXED))


# -- tensors -------------------------------------------------------------------------------------------------------


@pytest.mark.interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(paged: Paged, dtype: torch.dtype) -> None:
    run_mixed_steps(paged(layers(None, None, heads=6), MIXED, dtype=dtype))


@pytest.mark.interpreted
@pytest.mark.not_for(*FLASHINFER_NAMES)  # which refuse it
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_of_eight_bits(paged: Paged, dtype: torch.dtype) -> None:
    """What is left over is the same as with keys and values that were rounded before."""
    run_mixed_steps(paged(layers(None, 7), MIXED, dtype=dtype, kv_dtype=torch.float8_e4m3fn))


@pytest.mark.interpreted
def test_strided_views_of_one_projection_are_accepted(paged: Paged) -> None:
    sequences = paged(TWO_LAYERS, MIXED)
    sequences.fill([17, 1, 0, 0, 0, 8])
    for feeds in ({0: 1, 1: 1, 3: 7, 5: 9}, {0: 1, 1: 1}, {2: 40}):
        step = sequences.step(feeds)
        for i, (qkv, expected) in enumerate(step.layers):
            q, k, v = torch.cat(qkv, dim=1).split([4, 2, 2], dim=1)
            assert not q.is_contiguous()
            step.layers[i] = (q, k, v), expected
        sequences.check(sequences.outputs(step), step)


def test_arguments_are_not_changed(paged: Paged) -> None:
    sequences = paged(layers(None, 7), [20, 9, 30])
    sequences.fill([12, 0, 4])
    step = sequences.step({0: 1, 1: 9, 2: 8})
    fields = [getattr(step.inputs, name) for name in step.inputs.__slots__]
    given = [x for qkv, _ in step.layers for x in qkv] + [x for x in fields if isinstance(x, torch.Tensor)]
    given += [torch.from_numpy(getattr(step.batch, name)) for name in ("slots", "cu_seqlens_q", "seq_lens", "out_locs")]
    before = [x.clone() for x in given]
    sequences.outputs(step)
    for now, wanted in zip(given, before, strict=True):
        assert torch.equal(now, wanted)
    for name, field in zip(step.inputs.__slots__, fields, strict=True):
        assert getattr(step.inputs, name) is field, name


# -- steps beside and after one another ----------------------------------------------------------------------------


@pytest.mark.interpreted
@pytest.mark.parametrize("padding", [1, 5])
def test_padded_rows_disturb_nobody(paged: Paged, padding: int) -> None:
    """As in a CUDA graph, whose batch is larger than the step: rows of length 1, all on the dummy page."""
    sequences = paged(layers(None, 7), [20, 9, 30])
    sequences.fill([10, 5, 28])
    before = sequences.kv_cache.k[:, :-1].clone()
    for _ in range(2):
        step = sequences.step({0: 1, 1: 1, 2: 1}, padding=padding)
        sequences.check(sequences.outputs(step), step)
        for layer, ((_, k, _), _) in enumerate(step.layers):
            before[layer].flatten(0, 1)[step.inputs.out_locs[:3]] = k[:3]
    now = sequences.kv_cache.k[:, :-1]
    assert torch.equal(now.view(torch.int32), before.view(torch.int32))


@pytest.mark.interpreted
def test_a_second_plan_forgets_the_first(paged: Paged) -> None:
    """Whether the first was run or not, and however much the two look alike."""
    sequences = paged(layers(None, 7), [40, 40, 12, 12, 40])
    sequences.fill([30, 6, 6, 10, 25])
    sequences.run({0: 1, 1: 1})
    sequences.run({2: 1, 3: 1})  # as many rows and tokens, other lengths
    sequences.run({1: 1, 0: 1})  # the lengths of before, in the other order
    dropped = sequences.step({2: 5, 4: 15})
    sequences.backend.plan(dropped.batch, dropped.inputs)
    sequences.run({1: 20})
    sequences.run({0: 1})


def test_a_plan_serves_every_layer_in_any_order(paged: Paged) -> None:
    sequences = paged(layers(None, 7, None), [20, 9, 30])
    sequences.fill([12, 0, 4])
    step = sequences.step({0: 1, 1: 9, 2: 8})
    sequences.backend.plan(step.batch, step.inputs)
    outputs = {i: sequences.backend.forward(*step.layers[i][0], sequences.specs[i]) for i in (2, 1, 0, 2)}
    sequences.check([outputs[i] for i in range(3)], step)


def test_backends_over_two_caches_do_not_interfere(paged: Paged) -> None:
    both = [paged(TWO_LAYERS, [20, 9], page_size=4), paged(layers(7, None, heads=3, kv_heads=1), [31, 5], page_size=16)]
    for sequences in both:
        sequences.fill([12, 0])
    for feeds in ({0: 1, 1: 4}, {0: 1, 1: 1}):
        steps = [sequences.step(feeds) for sequences in both]
        for sequences, step in zip(both, steps, strict=True):
            sequences.backend.plan(step.batch, step.inputs)
        outputs: list[list[torch.Tensor]] = [[], []]
        for layer in range(2):
            for out, sequences, step in zip(outputs, both, steps, strict=True):
                out.append(sequences.backend.forward(*step.layers[layer][0], sequences.specs[layer]))
        for out, sequences, step in zip(outputs, both, steps, strict=True):
            sequences.check(out, step)


def test_says_whether_it_can_be_captured(paged: Paged) -> None:
    assert isinstance(paged(TWO_LAYERS, [1]).backend.capturable, bool)
