"""One backend for prefill rows, another for decode rows."""

from __future__ import annotations

import pytest
import torch

from minisgl.attention.hybrid import HybridAttention, split_phases
from minisgl.attention.select import select_backend
from minisgl.attention.torch_backend import TorchAttention
from minisgl.batch import Batch, DeviceBatch
from minisgl.context import AttentionSpec
from minisgl.errors import ConfigError
from minisgl.kvcache.pool import KVCache
from tests.attention import PagedSequences
from tests.steps import CPU, step_of

LAYERS = [AttentionSpec(i, 4, 2, 8, 0.3, window) for i, window in enumerate((None, 7))]


class OnlyPrefill(TorchAttention):
    """Refuses decode rows."""

    def plan(self, batch: Batch, inputs: DeviceBatch) -> None:
        assert batch.num_decode == 0
        super().plan(batch, inputs)


class OnlyDecode(TorchAttention):
    """Refuses everything else, and can be captured. Follows the page table."""

    capturable = True
    table: dict[int, int]

    def plan(self, batch: Batch, inputs: DeviceBatch) -> str:
        assert batch.num_decode == batch.num_rows == batch.num_tokens
        super().plan(batch, inputs)
        self.__dict__.setdefault("table", {}).update(zip(batch.page_index, batch.page_value, strict=True))
        return "decode"


def hybrid(kv_cache: KVCache) -> HybridAttention:
    return HybridAttention(kv_cache, OnlyPrefill(kv_cache), OnlyDecode(kv_cache))


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_each_backend_gets_its_rows(page_size: int) -> None:
    sequences = PagedSequences(hybrid, CPU, LAYERS, [40] * 6, page_size)
    sequences.fill([17, 1, 39, 0, 0, 8])
    sequences.run({0: 1, 1: 1, 2: 1, 3: 40, 4: 5, 5: 32})
    sequences.run({0: 1, 1: 1, 4: 11})
    sequences.run({1: 1, 0: 1})
    sequences.run({4: 24, 0: 20})


def test_a_decode_row_reads_what_a_prefill_row_of_the_step_writes() -> None:
    sequences = PagedSequences(hybrid, CPU, LAYERS, [13, 11])
    sequences.share(0, source=1, num_pages=2)
    sequences.kv_lens[0] = 8
    sequences.run({0: 1, 1: 11})


def test_a_backend_without_rows_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = KVCache(1, 2, 8, 4, 16, torch.float32, CPU)
    backend, asked = hybrid(cache), []
    for name in ("prefill", "decode"):

        def attend(q: torch.Tensor, spec: AttentionSpec, name: str = name) -> torch.Tensor:
            asked.append((name, q[:, 0, 0].tolist()))
            return q

        monkeypatch.setattr(getattr(backend, name), "attend", attend)
    q = torch.arange(3.0).view(3, 1, 1)
    for num_decode in (0, 2, 3):
        backend._num_decode = num_decode
        assert torch.equal(backend.attend(q, LAYERS[0]), q)
    assert asked == [("prefill", [0, 1, 2]), ("decode", [0, 1]), ("prefill", [2]), ("decode", [0, 1, 2])]


def test_decode_decides_whether_a_step_can_be_captured_and_names_its_work() -> None:
    sequences = PagedSequences(hybrid, CPU, LAYERS, [20, 20])
    sequences.fill([5, 6])
    step = sequences.step({0: 1, 1: 1})
    assert sequences.backend.capturable
    assert sequences.backend.plan(step.batch, step.inputs) == "decode"
    cache = sequences.kv_cache
    assert not HybridAttention(cache, OnlyDecode(cache), OnlyPrefill(cache)).capturable


def test_decode_hears_of_every_change_in_the_page_table() -> None:
    sequences = PagedSequences(hybrid, CPU, LAYERS, [20, 20])
    sequences.run({0: 3, 1: 5})
    sequences.page_table[-2, 0] = 7
    sequences.run({0: 1, 1: 3})
    sequences.page_table[-2, 0] = 9
    sequences.run({0: 5})
    flat = sequences.page_table.reshape(-1)
    assert sequences.backend.decode.table == dict(enumerate(flat))


def test_a_step_is_divided_into_two_whole_steps() -> None:
    batch, inputs = step_of([1, 1, 3, 2], [4, 30, 0, 5])
    for rows, (part, part_inputs) in zip((slice(0, 2), slice(2, 4)), split_phases(batch, inputs), strict=True):
        lens = zip(batch.q_lens[rows], (batch.seq_lens - batch.q_lens)[rows], strict=True)
        expected, _ = step_of(*zip(*lens, strict=True))
        assert part.cu_seqlens_q.tolist() == expected.cu_seqlens_q.tolist()
        assert part.positions.tolist() == expected.positions.tolist()
        assert part.num_decode == expected.num_decode
        assert part.slots.tolist() == batch.slots[rows].tolist()
        for name in ("slots", "seq_lens", "cu_seqlens_q", "positions", "out_locs"):
            assert getattr(part_inputs, name).tolist() == getattr(part, name).tolist()
        assert part_inputs.page_table is inputs.page_table


# -- by name -------------------------------------------------------------------------------------------------------

PREFILL, WHOLE = f"{__name__}:OnlyPrefill", f"{__name__}:Whole"


class Whole:
    """Does not say how to attend without storing."""

    capturable = captures_prefill = False

    def __init__(self, kv_cache: KVCache) -> None: ...

    def plan(self, batch: Batch, inputs: DeviceBatch) -> None: ...

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        raise NotImplementedError


@pytest.mark.parametrize("names", [("torch", "triton"), (PREFILL, "auto"), (PREFILL, "torch")])
def test_two_names_make_a_hybrid(names: tuple[str, str]) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sequences = PagedSequences(select_backend(*names), device, LAYERS, [20, 9, 30])
    assert isinstance(sequences.backend, HybridAttention)
    sequences.fill([12, 0, 4])
    sequences.run({0: 1, 1: 9, 2: 8})
    sequences.run({0: 1, 2: 1})


@pytest.mark.parametrize("names", [("torch", "torch"), ("auto", "torch"), ("torch", "auto"), ("auto", "auto")])
def test_names_that_come_to_the_same_make_one_backend(names: tuple[str, str]) -> None:
    cache = KVCache(1, 2, 8, 4, 16, torch.float32, CPU)
    assert type(select_backend(*names)(cache)) is TorchAttention
    assert isinstance(select_backend(WHOLE, WHOLE)(cache), Whole)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("torch", "nonsense"), "decode_attention: unknown name 'nonsense'; choose from .*torch"),
        (("", "torch"), "prefill_attention: unknown name ''"),
        (("torch,torch", "torch"), "prefill_attention: unknown name 'torch,torch'"),
        (("no.such:Attention", "torch"), "prefill_attention: cannot import"),
    ],
)
def test_other_names_are_refused(names: tuple[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        select_backend(*names)


def test_a_backend_that_cannot_attend_without_storing_does_not_fit() -> None:
    cache = KVCache(1, 2, 8, 4, 16, torch.float32, CPU)
    with pytest.raises(ConfigError, match=r"'torch' and '.*Whole' differ, so both have to be a PagedAttention"):
        select_backend("torch", WHOLE)(cache)
