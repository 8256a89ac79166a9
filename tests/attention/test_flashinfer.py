"""The FlashInfer backend: its planning anywhere, over a stand-in; its CUDA graphs on a GPU. The contract suite runs
over the real kernels, too."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from minisgl.attention.flashinfer import flashinfer_attention
from minisgl.attention.select import ATTENTION_BACKENDS, flashinfer_obstacle
from minisgl.attention.torch_backend import PagedAttention
from minisgl.context import AttentionSpec
from minisgl.errors import ConfigError
from minisgl.kvcache.pool import KVCache
from minisgl.registry import resolve
from tests.attention import PagedSequences, Step, fake_flashinfer
from tests.steps import CPU

MakeBackend = Callable[[KVCache], PagedAttention]
GPU = torch.device("cuda")


def layers(*windows: int | None, heads: int = 4, head_dim: int = 8) -> list[AttentionSpec]:
    return [AttentionSpec(i, heads, 2, head_dim, 0.3, window) for i, window in enumerate(windows)]


@pytest.fixture
def make_backend(monkeypatch: pytest.MonkeyPatch) -> MakeBackend:
    """The backend over the stand-in."""
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    monkeypatch.setattr(torch.cuda, "Event", fake_flashinfer.FakeEvent)
    monkeypatch.setattr(fake_flashinfer.FakeEvent, "finished", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=4))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return flashinfer_attention


def run_mixed_steps(sequences: PagedSequences) -> None:
    sequences.fill([17, 1, 39, 0, 0, 8])
    sequences.run({0: 1, 1: 1, 2: 1, 3: 40, 4: 5, 5: 32})
    sequences.run({0: 1, 1: 1, 4: 11})
    sequences.run({1: 1, 0: 1})
    sequences.run({4: 20, 0: 19})


@pytest.mark.parametrize("page_size", [1, 4, 64])
@pytest.mark.parametrize("heads", [2, 8])
def test_every_kind_of_step(make_backend: MakeBackend, page_size: int, heads: int) -> None:
    specs = layers(None, 7, None, 3, heads=heads)
    run_mixed_steps(PagedSequences(make_backend, CPU, specs, [40] * 6, page_size))


def test_long_rows_are_prefilled_by_version_3_and_short_ones_by_version_2(make_backend: MakeBackend) -> None:
    sequences = PagedSequences(make_backend, CPU, layers(None), [200, 200, 200])
    for feeds in ({0: 128, 1: 1}, {1: 128}, {0: 60, 2: 150}, {0: 2, 1: 2}):
        sequences.run(feeds, num_decode=0)
    used = next(iter(sequences.backend.prefill._kernels.values()))._by_version
    assert {version: wrapper.steps for version, (wrapper, _) in used.items()} == {
        "fa2": [[128, 1], [60, 150], [2, 2]],
        "fa3": [[128]],
    }


def test_a_captured_step_is_refreshed_in_place(make_backend: MakeBackend) -> None:
    """What a CUDA graph would do: the wrapper of the first step, run again after other steps were planned."""
    sequences = PagedSequences(make_backend, CPU, layers(None, 7), [40] * 4)
    sequences.fill([20, 3, 31, 9])
    first = sequences.step({0: 1, 1: 1})
    sequences.check(sequences.outputs(first), first)
    kernels = list(sequences.backend.decode._kernels.values())
    captured = [kernel._current.wrapper.run for kernel in kernels]
    sequences.run({0: 1, 1: 1, 2: 1})
    sequences.run({3: 20, 2: 2})
    for feeds, padding in (({2: 1, 3: 1}, 0), ({1: 1}, 1)):
        step = sequences.step(feeds, padding=padding)
        sequences.backend.plan(step.batch, step.inputs)
        outputs = []
        for layer, (((q, k, v), _), run) in enumerate(zip(step.layers, captured, strict=True)):
            sequences.kv_cache.store(layer, k, v, step.inputs.out_locs)
            outputs.append(run(q, (sequences.kv_cache.k[layer], sequences.kv_cache.v[layer]), 0.3))
        sequences.check(outputs, step)


def test_cannot_be_captured_before_it_has_run(make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = PagedSequences(make_backend, CPU, layers(None), [40])
    assert sequences.backend.capturable
    sequences.fill([20])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="run the step once before"):
        sequences.run({0: 1})


# -- where it cannot be used ---------------------------------------------------------------------------------------


def cache_on(device: torch.device, dtype: torch.dtype = torch.bfloat16, head_dim: int = 128) -> KVCache:
    """As far as anybody looks at it before it is used."""
    shape = torch.Size((1, 2, 16, 2, head_dim))
    return SimpleNamespace(k=SimpleNamespace(device=device, dtype=dtype, shape=shape))


@pytest.mark.parametrize(
    ("cache", "capability", "installed", "message"),
    [
        (cache_on(CPU), (9, 0), True, "needs an NVIDIA GPU and the device is 'cpu'"),
        (cache_on(GPU), (7, 5), True, "needs a GPU of compute capability 8.0 or later"),
        (cache_on(GPU, torch.float32), (9, 0), True, "computes float16 and bfloat16 and the KV cache is float32"),
        (cache_on(GPU, torch.float8_e4m3fn), (9, 0), True, "the KV cache is float8_e4m3fn"),
        (cache_on(GPU, head_dim=80), (9, 0), True, "heads of 64, 128 and 256 and the model's have 80"),
        (cache_on(GPU), (9, 0), False, r"pip install 'minisgl\[cuda\]'"),
    ],
    ids=["device", "capability", "dtype", "eight bits", "heads", "package"],
)
def test_says_what_is_missing_and_what_to_choose(
    monkeypatch: pytest.MonkeyPatch, cache: KVCache, capability: tuple[int, int], installed: bool, message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    spec = object() if installed else None
    monkeypatch.setattr("minisgl.attention.select.find_spec", lambda name: spec)
    with pytest.raises(
        ConfigError, match=f"decode_attention: FlashInfer cannot be used: .*{message}.*; choose 'triton' or 'torch'"
    ):
        resolve("attention", "flashinfer-fa2", ATTENTION_BACKENDS)(cache)
    monkeypatch.setattr("minisgl.attention.select.find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert flashinfer_obstacle(cache_on(GPU)) is None


def test_a_scale_that_would_unmask_is_refused(make_backend: MakeBackend) -> None:
    sequences = PagedSequences(make_backend, CPU, [AttentionSpec(0, 2, 2, 8, scale=1e-3)], [5])
    with pytest.raises(
        ConfigError, match=r"a scale of at least 0.002, the model has 0.001; choose 'triton' or 'torch'"
    ):
        sequences.run({0: 5})


def test_version_3_needs_a_hopper(make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match="needs a Hopper GPU; choose 'flashinfer-fa2'"):
        make_backend(cache_on(GPU), "fa3")


def test_is_imported_only_when_it_is_used() -> None:
    code = "import sys, minisgl.attention.flashinfer, minisgl.attention.select; assert 'flashinfer' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


# -- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.needs("flashinfer")
@pytest.mark.parametrize("page_size", [1, 16, 256])
@pytest.mark.parametrize("heads", [2, 8])
def test_a_cuda_graph_serves_other_lengths_slots_and_pages(heads: int, page_size: int) -> None:
    """One graph of four rows and two layers, replayed between eager steps of other shapes."""
    specs = layers(None, 7, heads=heads, head_dim=64)
    make_backend = resolve("attention", "flashinfer", ATTENTION_BACKENDS)
    sequences = PagedSequences(make_backend, GPU, specs, [3000] + [900] * 6, page_size, torch.bfloat16)
    sequences.fill([2900, 3, 31, 600, 45, 0, 0])
    out_locs = torch.zeros(4, dtype=torch.int32, device=GPU)
    static = [[torch.zeros(4, n, 64, dtype=torch.bfloat16, device=GPU) for n in (heads, 2, 2)] for _ in specs]

    def forward() -> list[torch.Tensor]:
        for spec, (_, k, v) in zip(specs, static, strict=True):
            sequences.kv_cache.store(spec.layer_id, k, v, out_locs)
        return [sequences.backend.attend(q, spec) for spec, (q, _, _) in zip(specs, static, strict=True)]

    def fill(feeds: dict[int, int], padding: int = 0) -> Step:
        step = sequences.step(feeds, padding=padding)
        sequences.backend.plan(step.batch, step.inputs)
        out_locs.copy_(step.inputs.out_locs)
        for mine, (given, _) in zip(static, step.layers, strict=True):
            for own, values in zip(mine, given, strict=True):
                own.copy_(values)
        return step

    step = fill({0: 1, 1: 1, 2: 1, 3: 1})
    sequences.check(forward(), step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = forward()
    for feeds, padding in (({4: 1, 2: 1, 1: 1, 0: 1}, 0), ({3: 1}, 3), ({0: 1, 1: 1, 3: 1}, 1), ({2: 1, 5: 1}, 2)):
        step = fill(feeds, padding)
        graph.replay()
        sequences.check(outputs, step)
        sequences.run({1: 1, 4: 1})
        sequences.run({0: 1, 5: 40, 6: 200})
