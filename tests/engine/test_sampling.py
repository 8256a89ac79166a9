"""The host side of sampling: slots, the stages that a batch needs, and the way to the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minisgl.batch import NewRequest
from minisgl.engine.random import draw_keys, splitmix64
from minisgl.engine.sampling import HostSampling, SamplingTable
from minisgl.request import Int32Array
from minisgl.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
EVERYTHING = SamplingParams(
    temperature=0.5,
    top_k=7,
    top_p=0.25,
    min_p=0.125,
    presence_penalty=0.5,
    frequency_penalty=-0.5,
    repetition_penalty=2.0,
    logit_bias={11: 1.5, 12: -2.5},
    min_tokens=4,
    logprobs=3,
)


def ints(*values: int) -> Int32Array:
    return np.array(values, dtype=np.int32)


def admission(slot: int, params: SamplingParams, seed: int = 0, prompt_len: int = 5) -> NewRequest:
    return NewRequest(slot, np.arange(prompt_len, dtype=np.int32), prompt_len, params, (2, 3), seed)


def table(*params: SamplingParams) -> SamplingTable:
    result = SamplingTable(len(params) + 1)
    for slot, one in enumerate(params):
        result.admit(admission(slot, one, seed=slot))
    return result


def test_a_greedy_batch_needs_nothing() -> None:
    rows = table(GREEDY, GREEDY).rows(ints(1, 0), ints(0, 3))
    assert rows == HostSampling()
    assert rows.all_greedy
    assert len(rows.pack()) == 0


def test_an_empty_batch_needs_nothing() -> None:
    assert table(EVERYTHING).rows(ints(), ints()) == HostSampling()


def test_a_greedy_request_needs_no_filter() -> None:
    params = SamplingParams(temperature=0.0, top_k=3, top_p=0.5, min_p=0.5)
    assert table(params).rows(ints(0), ints(0)) == HostSampling()


@pytest.mark.parametrize(
    ("params", "stages"),
    [
        (SamplingParams(), {"random"}),
        (SamplingParams(top_k=1), {"random", "top"}),
        (SamplingParams(top_p=0.5), {"random", "top"}),
        (SamplingParams(min_p=0.5), {"random", "min_p"}),
        (SamplingParams(temperature=0.0, presence_penalty=0.1), {"penalties"}),
        (SamplingParams(temperature=0.0, frequency_penalty=0.1), {"penalties"}),
        (SamplingParams(temperature=0.0, repetition_penalty=1.1), {"penalties"}),
        (SamplingParams(temperature=0.0, logit_bias={1: 1.0}), {"bias"}),
        (SamplingParams(temperature=0.0, logit_bias={}), set()),
        (SamplingParams(temperature=0.0, min_tokens=1), {"mask"}),
        (SamplingParams(temperature=0.0, logprobs=0), {"logprobs"}),
    ],
)
def test_a_parameter_switches_its_stage_on(params: SamplingParams, stages: set[str]) -> None:
    rows = table(GREEDY, params).rows(ints(0, 1), ints(0, 0))
    names = {"logprobs", "bias", "penalties", "mask", "random", "top", "min_p"}
    assert {name for name in names if getattr(rows, name) is not None} == stages
    assert rows.all_greedy == ("random" not in stages)
    assert table(GREEDY, params).rows(ints(0), ints(0)) == HostSampling(), "the other row alone needs nothing"


def test_stages_list_the_rows_that_need_them() -> None:
    rows = table(GREEDY, EVERYTHING, SamplingParams()).rows(ints(2, 1, 0, 1), ints(0, 2, 0, 9))
    assert rows.random is not None
    assert rows.random.temperature.tolist() == [1.0, 0.5, 0.0, 0.5]
    assert rows.min_p is not None
    assert rows.min_p.tolist() == [0.0, 0.125, 0.0, 0.125]
    assert rows.top is not None
    assert [x.tolist() for x in rows.top[:-1]] == [[1, 3], [7, 7], [0.25, 0.25]]
    assert rows.penalties is not None
    assert [x.tolist() for x in rows.penalties[:-1]] == [
        [1, 3],
        [0.5, 0.5],
        [-0.5, -0.5],
        [2.0, 2.0],
        [1, 1],
        [5, 5],
        [7, 14],
    ]
    assert rows.penalties.max_token_len == 14
    assert rows.bias is not None
    assert [x.tolist() for x in rows.bias] == [[1, 1, 3, 3], [11, 12, 11, 12], [1.5, -2.5, 1.5, -2.5]]
    assert rows.mask is not None
    assert [x.tolist() for x in rows.mask] == [[1, 1], [2, 3]], "row 3 has its 4 tokens"
    assert rows.logprobs is not None
    assert rows.logprobs.rows.tolist() == [1, 3]
    assert rows.logprobs.counts.tolist() == [3, 3]


def test_the_mask_ends_with_min_tokens() -> None:
    short = table(EVERYTHING)
    assert short.rows(ints(0), ints(3)).mask is not None
    assert short.rows(ints(0), ints(4)).mask is None


def test_the_largest_top_k_bounds_the_sort() -> None:
    several = table(SamplingParams(top_k=3), SamplingParams(top_k=8), SamplingParams(top_p=0.9))
    top = several.rows(ints(0, 1), ints(0, 0)).top
    assert top is not None
    assert top.max_top_k == 8
    top = several.rows(ints(0, 2), ints(0, 0)).top
    assert top is not None
    assert top.max_top_k == 2**31 - 1, "top-p alone needs all tokens"


@pytest.mark.parametrize("after", [GREEDY, SamplingParams(), SamplingParams(logprobs=1)])
def test_a_slot_inherits_nothing(after: SamplingParams) -> None:
    reused, fresh = table(EVERYTHING), SamplingTable(2)
    for one in (reused, fresh):
        one.admit(admission(0, after, seed=9, prompt_len=2))
    assert reused.__dict__.keys() == fresh.__dict__.keys()
    for name, value in vars(reused).items():
        if isinstance(value, np.ndarray):
            assert np.array_equal(value[0], vars(fresh)[name][0]), name
        else:
            assert value == vars(fresh)[name], name


def test_preemption_changes_nothing_but_the_slot() -> None:
    before, after = SamplingTable(2), SamplingTable(2)
    before.admit(NewRequest(0, np.arange(5, dtype=np.int32), 5, EVERYTHING, (2, 3), 77))
    after.admit(NewRequest(1, np.arange(5 + 3, dtype=np.int32), 5, EVERYTHING, (2, 3), 77))  # 3 of them are output
    first, again = before.rows(ints(0), ints(3)), after.rows(ints(1), ints(3))
    assert first.penalties is not None
    assert again.penalties is not None
    assert again.penalties.slots.tolist() == [1]
    again.penalties.slots[:] = 0
    assert np.array_equal(first.pack(), again.pack())


def test_the_largest_values_fit_the_arrays() -> None:
    largest = 2**31 - 1
    rows = table(SamplingParams(top_k=largest, max_tokens=None, min_tokens=largest)).rows(ints(0), ints(5))
    assert rows.top is not None
    assert rows.top.top_k.tolist() == [2**31 - 1]
    assert rows.mask is not None


def test_masks_travel_with_the_other_stages() -> None:
    """In a batch that needs nothing else, too."""
    for params in (GREEDY, EVERYTHING):
        rows = table(params, params).rows(ints(0, 1), ints(0, 2))
        constrained = rows.constrained(ints(1), ints(-1, 5))
        inputs = constrained.unpack(torch.from_numpy(constrained.pack()))
        assert inputs.constraint is not None
        assert [part.tolist() for part in inputs.constraint] == [[1], [-1, 5]]
        assert not constrained.needs_only_temperatures
        assert constrained.adjusts_logits
        assert rows.constraint is None
        assert [constrained.bias, constrained.random] == [rows.bias, rows.random]


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_unpack_undoes_pack_wherever_the_words_lie(offset: int) -> None:
    rows = table(GREEDY, EVERYTHING, SamplingParams()).rows(ints(2, 1, 0), ints(0, 2, 0))
    words = torch.from_numpy(rows.pack())
    buffer = torch.cat([torch.zeros(offset, dtype=torch.int32), words, torch.zeros(3, dtype=torch.int32)])
    inputs = rows.unpack(buffer[offset : offset + len(words)])

    def same(host: object, device: object) -> None:
        if isinstance(host, np.ndarray):
            assert isinstance(device, torch.Tensor)
            assert np.array_equal(host, device.numpy())
            assert str(device.dtype) == f"torch.{host.dtype}"
        else:
            assert host == device

    same(rows.min_p, inputs.min_p)
    for name in ("logprobs", "bias", "penalties", "mask", "random", "top"):
        host, device = getattr(rows, name), getattr(inputs, name)
        assert type(host) is type(device)
        for one, other in zip(host, device, strict=True):
            same(one, other)


def test_history_is_there_for_penalties_only() -> None:
    tokens = torch.zeros(3, 16, dtype=torch.int32)
    rows = table(GREEDY, EVERYTHING).rows(ints(0, 1), ints(0, 2))
    history = rows.unpack(torch.from_numpy(rows.pack())).history(tokens)
    assert history is not None
    assert history.tokens is tokens
    assert [history.slots.tolist(), history.prompt_len.tolist(), history.token_len.tolist()] == [[1], [5], [7]]
    assert HostSampling().unpack(torch.zeros(0, dtype=torch.int32)).history(tokens) is None


def test_splitmix64_gives_the_published_numbers() -> None:
    gamma = 0x9E3779B97F4A7C15
    states = np.array([(1234567 + i * gamma) % 2**64 for i in range(5)], dtype=np.uint64)
    assert splitmix64(states).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_keys_are_the_stream_of_the_hash_of_the_seed() -> None:
    gamma = 0x9E3779B97F4A7C15
    for seed in (0, 7, 2**63 - 1, 2**64 - 1):
        key = int(splitmix64(np.array([seed], dtype=np.uint64))[0])
        index = np.array([0, 1, 1000, 2**31 - 1], dtype=np.int32)
        states = np.array([(key + i * gamma) % 2**64 for i in index.tolist()], dtype=np.uint64)
        low, high = draw_keys(np.full(4, key, dtype=np.uint64), index)
        joined = [int(h) % 2**32 * 2**32 + int(lo) % 2**32 for lo, h in zip(low, high, strict=True)]
        assert joined == splitmix64(states).tolist()


def test_the_stream_of_a_request_starts_at_the_hash_of_its_seed() -> None:
    seeds = SamplingTable(2)
    for slot, seed in enumerate((5, 2**63 + 126)):
        seeds.admit(admission(slot, SamplingParams(), seed=seed))
    random = seeds.rows(ints(1, 0), ints(8, 9)).random
    assert random is not None
    low, high = draw_keys(splitmix64(np.array([2**63 + 126, 5], dtype=np.uint64)), ints(8, 9))
    assert random.key_low.tolist() == low.tolist()
    assert random.key_high.tolist() == high.tolist()
