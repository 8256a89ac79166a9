"""The example traces that lie in the repository."""

from __future__ import annotations

import pytest

from minisgl.bench.load import read_trace
from tests.bench.test_load import EXAMPLES


@pytest.mark.parametrize(("name", "size"), [("mooncake", 512), ("qwen", 16)])
def test_the_examples_are_traces_with_prefixes_in_common(name: str, size: int) -> None:
    requests = read_trace(EXAMPLES / f"{name}-example.jsonl")
    assert len(requests) >= 30
    assert {request.blocks.size for request in requests} == {size}
    seen: set[int] = set()
    repeated = 0
    for request in requests:
        repeated += len(seen & set(request.blocks.ids))
        seen |= set(request.blocks.ids)
    assert repeated > len(requests)
