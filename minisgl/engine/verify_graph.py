"""Steps that verify drafts as CUDA graphs: rows of up to 1 + k tokens, each of which is sampled behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from minisgl.batch import Batch
from minisgl.config import EngineConfig
from minisgl.engine.cuda_graph import CudaGraphCapture, GraphCapture, extrapolate_memory, sizes_to_capture
from minisgl.engine.model_runner import ModelRunner
from minisgl.engine.prefill_graph import PrefillGraphRunner, StepBuffers, dummy_step
from minisgl.engine.sampler import SampledTokens
from minisgl.engine.sampling import HostSampling
from minisgl.models.decoder import CausalLM

# More rows than these have so many tokens to verify that arithmetic, not memory, takes the time: drafts do not pay.
_MAX_ROWS = 128


class VerifyGraphRunner(PrefillGraphRunner):
    """Replays steps with drafts and without prefill rows, padded to the next of ``sizes`` (rows of ``q_len`` tokens).

    Rows may be shorter, down to a decode row. Other steps are left to ``runner``.
    """

    def __init__(self, runner: ModelRunner, sizes: Sequence[int], q_len: int, capture: GraphCapture) -> None:
        self._fallback = runner
        self._q_len = q_len
        super().__init__(runner, [rows * q_len for rows in sizes], capture)

    def run_eagerly(self, batch: Batch, sampling: HostSampling) -> SampledTokens:
        return self._fallback.run(batch, sampling)

    def make_buffers(self, size: int) -> StepBuffers:
        return StepBuffers(self.state, self.kv_cache.page_size, size, verified_rows=size // self._q_len)

    def dummy_steps(self, buffers: StepBuffers) -> Iterator[Batch]:
        rows = len(buffers.inputs.slots) - 1
        yield dummy_step(buffers, [self._q_len] * rows, num_decode=0)
        if rows > 1:
            yield dummy_step(buffers, [1] + [self._q_len] * (rows - 1), num_decode=1)

    def size_for(self, batch: Batch) -> int | None:
        """Tokens of the smallest graph that holds the step; None if it has no drafts, or prefill rows too."""
        if len(batch.drafts) == 0 or batch.num_tokens != len(batch.sample_rows):
            return None
        needed = max(batch.num_rows * self._q_len, batch.num_tokens)
        return min((size for size in self.buffers if size >= needed), default=None)


def build_verify_runner(config: EngineConfig, runner: ModelRunner, capture: GraphCapture) -> ModelRunner:
    """Return ``runner``, or with a drafter one that replays verification where prefill steps could be captured too."""
    sizes = rows_to_verify(config, runner)
    return VerifyGraphRunner(runner, sizes, config.num_draft_tokens + 1, capture) if sizes else runner


def rows_to_verify(config: EngineConfig, runner: ModelRunner) -> tuple[int, ...]:
    """Numbers of rows to capture; none without a drafter, or where attention cannot be captured for prefill rows."""
    if config.drafter == "none" or not (runner.attention.captures_prefill and isinstance(runner.model, CausalLM)):
        return ()
    sizes = sizes_to_capture(config, runner)
    longest = runner.state.tokens.shape[1] - 1
    if config.num_draft_tokens >= longest:
        return ()
    return tuple(rows for rows in sizes if rows <= _MAX_ROWS)


def measure_verify_memory(config: EngineConfig, runner: ModelRunner) -> int:
    """Bytes that the graphs of verification will keep on the device."""
    sizes = rows_to_verify(config, runner)
    if not sizes:
        return 0
    q_len = config.num_draft_tokens + 1
    trial = VerifyGraphRunner(runner, (), q_len, CudaGraphCapture(runner.device))
    return extrapolate_memory(trial.capture, [rows * q_len for rows in sizes], runner.device)
