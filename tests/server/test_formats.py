"""Counting, without a server."""

from __future__ import annotations

from minisgl.messages import Update
from minisgl.server.formats import Usage


def test_tokens_are_counted_as_they_come() -> None:
    usage = Usage([7], n=1)
    usage.add(Update(0, 0, "a", [1]))
    usage.add(Update(0, 0, "", [2, 3]))
    usage.add(Update(0, 0, "b", [4], finish_reason="stop", cached_tokens=4))
    body = usage.body()
    assert (body["prompt_tokens"], body["completion_tokens"], body["total_tokens"]) == (7, 4, 11)
    assert body["prompt_tokens_details"] == {"cached_tokens": 4}


def test_cached_tokens_are_counted_once_a_prompt() -> None:
    usage = Usage([7, 9], n=2)
    for choice, cached in ((0, 4), (1, 6), (2, 0), (3, 8)):
        usage.add(Update(0, choice, "", [1], cached_tokens=cached))
        usage.add(Update(0, choice, "", [1], finish_reason="length", cached_tokens=cached))
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (16, 8, 4)
