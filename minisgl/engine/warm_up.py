"""Steps before the first request, which would otherwise pay for what happens once.

The first launch of a kernel compiles it or loads it, and the first matrix product of a shape chooses its algorithm. All
of that takes from milliseconds to seconds, and none of it needs real requests.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from minisgl.core.batch import Batch, NewRequest, build_batch
from minisgl.core.sampling_params import SamplingParams
from minisgl.engine.memory import largest_prefill
from minisgl.engine.runner import ModelRunner
from minisgl.engine.sampling_table import SamplingTable

_KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_k=20, top_p=0.9, min_p=0.01),
)
"""Ways to sample that have kernels of their own."""


@torch.inference_mode()
def warm_up_kernels(runner: ModelRunner, max_prefill_tokens: int) -> None:
    """Run prefill steps on the dummy slot, from the largest legal one down, and sample in every way.

    Args:
        runner: of the engine; only the dummy slot and the dummy page are written.
        max_prefill_tokens: most prompt tokens of a step.
    """
    table = SamplingTable(1)
    for batch in _prefill_steps(runner, max_prefill_tokens):
        for params in _KINDS:
            table.admit(NewRequest(0, np.zeros(1, dtype=np.int32), 1, params, (), seed=0))
            first = np.zeros(batch.num_rows, dtype=np.int32)
            runner.run(batch, table.rows(first, first))


def _prefill_steps(runner: ModelRunner, max_prefill_tokens: int) -> Iterator[Batch]:
    """As many tokens as a step may have: in long rows, then in as many rows as may be. Then a few, and a few behind
    tokens that are cached."""
    num_slots, longest = runner.state.tokens.shape[0], runner.state.tokens.shape[1] - 1
    most = largest_prefill(max_prefill_tokens, num_slots - 1, longest)
    few = min(16, sum(most), longest - longest // 2)
    yield _prefill(runner, most, cached=0)
    yield _prefill(runner, [few] * min(num_slots - 1, sum(most) // few), cached=0)
    yield _prefill(runner, [few], cached=0)
    yield _prefill(runner, [few], cached=longest // 2)


def _prefill(runner: ModelRunner, q_lens: list[int], cached: int) -> Batch:
    """Rows of the dummy slot, each behind as many cached tokens, all in the dummy page."""
    state, rows = runner.state, len(q_lens)
    num_slots, width = state.page_table.shape
    return build_batch(
        slots=np.full(rows, num_slots - 1, dtype=np.int32),
        q_lens=np.array(q_lens, dtype=np.int32),
        kv_lens=np.full(rows, cached, dtype=np.int32),
        page_table=np.full((num_slots, width), state.dummy_page, dtype=np.int32),
        page_size=runner.kv_cache.page_size,
        sample_rows=np.arange(rows, dtype=np.int32),
        output_index=np.zeros(rows, dtype=np.int32),
        num_decode=0,
    )
