"""Prompts: the same number gives the same tokens, and nothing else does."""

from __future__ import annotations

import numpy as np

from minisgl.bench.serve.prompts import prompt_tokens
from minisgl.bench.serve.traces import Blocks


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
