"""What is sent: arrivals by their statistics, traces, plans and prompts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl.bench.load import (
    MALFORMED,
    Blocks,
    LoadError,
    TraceRequest,
    Traffic,
    constant,
    poisson,
    prompt_tokens,
    read_trace,
    scaled,
)


def test_poisson_arrivals_have_their_rate_and_no_memory() -> None:
    times = poisson(8.0, 20_000, np.random.default_rng(1))
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.03)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.03)  # an exponential distribution's own
    assert np.quantile(gaps, 0.5) == pytest.approx(np.log(2) / 8, rel=0.03)
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.03
    in_each_second = np.bincount(times.astype(int))[:-1]
    assert in_each_second.var() == pytest.approx(in_each_second.mean(), rel=0.1)


def test_a_seed_gives_the_same_arrivals() -> None:
    first, again, other = (poisson(2.0, 50, np.random.default_rng(seed)).tolist() for seed in (3, 3, 4))
    assert first == again != other


def test_constant_arrivals_keep_their_distance() -> None:
    assert constant(4.0, 5).tolist() == [0.25, 0.5, 0.75, 1.0, 1.25]


def test_a_recording_keeps_its_bursts_at_another_rate() -> None:
    recorded = np.array([0.0, 0.0, 3.0, 4.0])
    assert scaled(recorded, 1.5).tolist() == [0.0, 0.0, 1.5, 2.0]  # three gaps in two seconds


def test_a_recording_of_one_moment_has_no_rate() -> None:
    with pytest.raises(LoadError, match=r"^rate: .* leave --rate out"):
        scaled(np.zeros(4), 1.0)


EXAMPLES = Path(__file__).parents[2] / "benchmarks" / "traces"
MOONCAKE = {"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [0, 9]}
QWEN = {
    "chat_id": 5,
    "parent_chat_id": -1,
    "timestamp": 2.5,
    "input_length": 33,
    "output_length": 4,
    "type": "text",
    "turn": 1,
    "hash_ids": [7, 8, 3],
}


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    trace = path / "trace.jsonl"
    trace.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return trace


def test_mooncake_counts_in_milliseconds_and_blocks_of_512(tmp_path: Path) -> None:
    second = {**MOONCAKE, "timestamp": 2000, "input_length": 1024, "hash_ids": [0, 1]}
    assert read_trace(write(tmp_path, MOONCAKE, second)) == [
        TraceRequest(1.5, 600, 7, Blocks((0, 9), 512)),
        TraceRequest(2.0, 1024, 7, Blocks((0, 1), 512)),
    ]


def test_qwen_counts_in_seconds_and_blocks_of_16(tmp_path: Path) -> None:
    second = {
        **QWEN,
        "chat_id": 6,
        "parent_chat_id": 5,
        "turn": 2,
        "hash_ids": [7, 8],
    }  # without the block that is not full
    assert read_trace(write(tmp_path, QWEN, second)) == [
        TraceRequest(2.5, 33, 4, Blocks((7, 8, 3), 16)),
        TraceRequest(2.5, 33, 4, Blocks((7, 8), 16)),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "truncated"),
        ("", "truncated"),
        ("[]", "object"),
        ({**MOONCAKE, "input_length": 0}, r"\$\.input_length"),
        ({**MOONCAKE, "output_length": "7"}, r"\$\.output_length"),
        ({**MOONCAKE, "timestamp": -1}, r"\$\.timestamp"),
        ({**MOONCAKE, "hash_ids": [-4, 5]}, r"\$\.hash_ids"),
        ({key: value for key, value in MOONCAKE.items() if key != "hash_ids"}, "hash_ids"),
        ({**MOONCAKE, "priority": 3}, "priority"),
        ({**MOONCAKE, "hash_ids": [1, 2, 3]}, "has 3 blocks, but 600 tokens of input_length are 2 blocks of 512"),
        ({**MOONCAKE, "hash_ids": []}, "has 0 blocks"),
        ({**MOONCAKE, "timestamp": 1000}, "sort the trace"),
        (QWEN, "chat_id"),
    ],
)
def test_a_line_that_is_wrong_is_named_by_its_number(tmp_path: Path, line: Any, message: str) -> None:
    trace = write(tmp_path, MOONCAKE, MOONCAKE, line)
    with pytest.raises(LoadError, match=rf"trace\.jsonl, line 3: .*{message}"):
        read_trace(trace)


def test_a_trace_that_is_not_there_or_empty(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"missing\.jsonl: cannot be read"):
        read_trace(tmp_path / "missing.jsonl")
    with pytest.raises(LoadError, match="at least one request"):
        read_trace(write(tmp_path))


def test_lengths_lie_between_the_least_and_the_most() -> None:
    plan = Traffic(500, (8, 32), (1, 16)).plan(None, 0)
    assert {each.input_len for each in plan} == set(range(8, 33))
    assert {each.output_len for each in plan} == set(range(1, 17))
    assert [each.index for each in plan] == list(range(500))
    assert {each.due for each in plan} == {0.0}


def test_exact_shares_misbehave_and_nobody_twice() -> None:
    plan = Traffic(400, (8, 8), (4, 9), disconnects=0.1, malformed=0.05).plan(None, 0)
    leaving = [each for each in plan if each.leave_after is not None]
    wrong = [each for each in plan if each.malformed is not None]
    assert (len(leaving), len(wrong)) == (40, 20)
    assert not set(leaving) & set(wrong)
    assert all(0 <= (each.leave_after or 0) < each.output_len for each in leaving)
    assert set(Counter(each.malformed for each in wrong)) == set(MALFORMED)
    assert max(each.index for each in leaving) > 200 > min(each.index for each in leaving)


def test_a_run_is_repeated_by_its_seed_and_differs_from_the_next() -> None:
    traffic = Traffic(50, (8, 32), (1, 16), disconnects=0.2, seed=7)
    assert traffic.plan(4.0, 0) == traffic.plan(4.0, 0)
    assert traffic.plan(4.0, 0) != traffic.plan(4.0, 1)


def test_an_open_loop_has_times_of_its_kind() -> None:
    random = [each.due for each in Traffic(200, seed=1).plan(10.0, 0)]
    even = [each.due for each in Traffic(200, arrivals="constant").plan(10.0, 0)]
    assert random == sorted(random)
    assert random[-1] == pytest.approx(20.0, rel=0.25)
    assert even[:3] == [0.1, 0.2, pytest.approx(0.3)]
    assert random != even


def test_a_trace_brings_lengths_blocks_and_times(tmp_path: Path) -> None:
    later = {**MOONCAKE, "timestamp": 3500, "output_length": 9}
    traffic = Traffic(trace=write(tmp_path, MOONCAKE, later))
    first, second = traffic.plan(None, 0)
    assert (first.due, second.due) == (0.0, 2.0)
    assert (first.input_len, first.output_len, second.output_len) == (600, 7, 9)
    assert first.blocks is not None
    assert first.blocks.ids == (0, 9)
    assert [each.due for each in traffic.plan(5.0, 0)] == [0.0, pytest.approx(0.2)]
    assert len(Traffic(1, trace=traffic.trace).plan(None, 0)) == 1
    with pytest.raises(LoadError, match=r"requests: .* has 2, got 3"):
        Traffic(3, trace=traffic.trace).plan(None, 0)


def shared(one: list[int], other: list[int]) -> int:
    """Tokens that two prompts have in common at their beginning."""
    differ = [a != b for a, b in zip(one, other, strict=False)]
    return differ.index(True) if True in differ else len(differ)


def test_prompts_share_the_tokens_of_the_blocks_that_they_share() -> None:
    one = prompt_tokens(0, 50, Blocks((7, 8, 9, 10), 16), 10_000, seed=1)
    two = prompt_tokens(1, 60, Blocks((7, 8, 11, 12), 16), 10_000, seed=1)
    whole = prompt_tokens(2, 64, Blocks((7, 8, 9, 10), 16), 10_000, seed=1)
    assert shared(one, two) == 32
    assert shared(one, whole) == 50  # a block that is not full is the beginning of one that is
    assert [len(one), len(two), len(whole)] == [50, 60, 64]


def test_a_block_is_the_same_wherever_it_stands() -> None:
    one = prompt_tokens(0, 32, Blocks((7, 8), 16), 10_000, seed=1)
    two = prompt_tokens(1, 48, Blocks((5, 6, 7), 16), 10_000, seed=1)
    assert one[:16] == two[32:]


def test_what_the_blocks_leave_open_belongs_to_the_request() -> None:
    one, two = (prompt_tokens(index, 40, Blocks((7, 8), 16), 10_000, seed=1) for index in (0, 1))
    assert shared(one, two) == 32


def test_prompts_without_blocks_share_nothing_and_are_the_same_again() -> None:
    prompts = [prompt_tokens(index, 100, None, 10_000, seed=1) for index in range(20)]
    assert all(shared(one, two) < 2 for one in prompts for two in prompts if one is not two)
    assert prompts[3] == prompt_tokens(3, 100, None, 10_000, seed=1)
    assert shared(prompts[3], prompt_tokens(3, 100, None, 10_000, seed=2)) < 2


def test_tokens_are_spread_over_the_vocabulary() -> None:
    tokens = np.array([prompt_tokens(index, 100, None, 50, seed=1) for index in range(200)])
    counts = np.bincount(tokens.ravel(), minlength=50)
    assert len(counts) == 50
    assert counts.std() < 3 * np.sqrt(counts.mean())
    assert abs(np.corrcoef(tokens[:-1].ravel(), tokens[1:].ravel())[0, 1]) < 0.03
