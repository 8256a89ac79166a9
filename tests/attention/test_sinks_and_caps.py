"""Attention sinks and soft caps: every backend that says it knows them computes what the definition says."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from minisgl.attention.cascade import CascadeAttention
from minisgl.attention.hybrid import HybridAttention
from minisgl.attention.torch_backend import TorchAttention
from minisgl.attention.triton.backend import FixedSplitAttention, TritonAttention
from minisgl.context import AttentionSpec
from minisgl.kvcache.pool import KVCache
from tests.attention import PagedSequences
from tests.attention.test_cascade import check

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EagerCascade = partial(CascadeAttention, min_rows=2, min_tokens=1, min_saved=1)


def layers(*windows: int | None, group: int = 2, soft_cap: float | None = None) -> list[AttentionSpec]:
    """Layers whose heads have sinks from nothing, in effect, to most of the weight."""
    sinks = torch.linspace(-8.0, 6.0, 2 * group, device=DEVICE)
    return [AttentionSpec(i, 2 * group, 2, 16, 0.25, window, soft_cap, sinks) for i, window in enumerate(windows)]


@pytest.mark.parametrize("backend", [TorchAttention, TritonAttention])
@pytest.mark.parametrize("group", [1, 3])
def test_sinks_in_a_mixed_step(backend: type[TorchAttention], group: int) -> None:
    """Rows in one program and in several, decoded and prefilled, with and without a window."""
    assert "sinks" in backend.features
    sequences = PagedSequences(backend, DEVICE, layers(None, 50, group=group), [20, 140, 300, 9], 16)
    sequences.fill([5, 137, 290, 0])
    sequences.run({1: 1, 2: 1, 0: 11, 3: 9})
    sequences.run({1: 1, 2: 1, 0: 1})


def test_sinks_count_once_for_rows_that_share_a_prefix() -> None:
    sequences = PagedSequences(EagerCascade, DEVICE, layers(None, 30), [90, 100, 95, 30], page_size=4)
    for row in (1, 2):
        sequences.share(row, 0, 17)
    sequences.fill([80, 75, 90, 22])
    check(sequences, sequences.step(dict.fromkeys(range(4), 1)))


@pytest.mark.parametrize("sinks", [False, True])
def test_soft_caps(sinks: bool) -> None:
    assert "soft_cap" in TorchAttention.features
    specs = layers(None, 7, soft_cap=0.5)
    if not sinks:
        specs = [AttentionSpec(s.layer_id, 4, 2, 16, 0.25, s.sliding_window, 0.5) for s in specs]
    sequences = PagedSequences(TorchAttention, DEVICE, specs, [20, 40, 9], 4)
    sequences.fill([5, 37, 0])
    sequences.run({1: 1, 0: 11, 2: 9})


def test_backends_say_what_they_do_not_know() -> None:
    cache = KVCache(1, 2, 16, 4, 16, torch.float32, DEVICE)
    assert "soft_cap" not in TritonAttention.features
    assert not FixedSplitAttention.features
    both = HybridAttention(cache, TorchAttention(cache), FixedSplitAttention(cache))
    assert not both.features
