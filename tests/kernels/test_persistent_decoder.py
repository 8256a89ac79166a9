"""The decoder whose layers are one kernel against the plain one, and its instructions one at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from minisgl.batch import DeviceBatch
from minisgl.engine.cuda_graph import CudaGraphCapture
from minisgl.kernels.persistent_decoder import OPERATIONS
from minisgl.models.decoder import CausalLM
from minisgl.models.persistent_decoder import PersistentDecoder
from minisgl.models.single_token import SingleTokenDecoder
from tests.kernels.loading import DEVICE, load
from tests.kernels.test_single_token import GROUPED, VARIANTS
from tests.model_zoo import ARCHITECTURES, Variant, random_tokens
from tests.paged_runner import PagedRunner

NAMED = {variant.name: variant for variant in VARIANTS}
QWEN3 = NAMED["qwen3"]
BIASED = Variant("qwen2", "Qwen2ForCausalLM", GROUPED)


@pytest.mark.parametrize(
    ("variant", "programs", "kv_dtype"),
    [
        (QWEN3, 5, None),  # no number of rows can be divided by it
        (QWEN3, 24, torch.float8_e4m3fn),  # more than some products have rows
        (BIASED, 8, None),
        (NAMED["mistral-window"], 2, None),  # a program for each KV head: no head is split
        (NAMED["smollm3"], 8, None),
    ],
    ids=["five programs", "many programs, eight bits", "biases", "window", "layers without angles"],
)
def test_steps_give_the_logits_of_the_plain_decoder(
    tmp_path: Path, variant: Variant, programs: int, kv_dtype: torch.dtype | None
) -> None:
    """Behind a prompt of several parts of keys, and twice in a row behind a single token."""
    model, config = load(tmp_path, variant)
    assert PersistentDecoder.supports(model)
    plain, fast = (PagedRunner.of(model, config, torch.float32, 2, 160, 8, kv_dtype) for _ in range(2))
    for runner in (plain, fast):
        runner.step({0: random_tokens(150)[0], 1: random_tokens(1)[0]})
    decoder = PersistentDecoder(model, fast.cache, programs)
    fast.model = decoder
    for slot in (0, 1, 1):
        step = {slot: np.array([7 + slot], dtype=np.int32)}
        expected, logits = plain.step(step)[0], fast.step(step)[0]
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
        assert not decoder.persistent.arrivals.any(), "the counters are as they were"
    for ours, reference in ((fast.cache.k, plain.cache.k), (fast.cache.v, plain.cache.v)):
        assert torch.equal(ours.float().isnan(), reference.float().isnan()), "the same places are written"
        torch.testing.assert_close(ours.float(), reference.float(), rtol=1e-3, atol=1e-3, equal_nan=True)


class ByInstruction(PersistentDecoder):
    """Launches each instruction alone, and notes what it has written."""

    def run_layers(self, stream: torch.Tensor, inputs: DeviceBatch) -> torch.Tensor:
        machine = self.persistent
        machine.stream.copy_(stream)
        buffers = {"stream": machine.stream, "qkv": machine.qkv, "attended": machine.attended}
        buffers["activated"] = machine.activated
        self.written: list[set[str]] = []
        for number in range(machine.count):
            before = {name: buffer.clone() for name, buffer in buffers.items()}
            self.run_instructions(inputs, number, number + 1)
            self.written.append({name for name, buffer in buffers.items() if not torch.equal(buffer, before[name])})
        return machine.stream


def test_each_instruction_writes_one_vector(tmp_path: Path) -> None:
    model, config = load(tmp_path, QWEN3)
    whole, single = (PagedRunner.of(model, config, torch.float32, 1, 16, 8) for _ in range(2))
    whole.model = PersistentDecoder(model, whole.cache)
    decoder = ByInstruction(model, single.cache)
    single.model = decoder
    for runner in (whole, single):
        machine = runner.model.persistent
        for buffer in (machine.qkv, machine.attended, machine.activated):
            buffer.zero_()
    step = {0: np.array([7], dtype=np.int32)}
    assert torch.equal(single.step(step)[0], whole.step(step)[0])
    written = dict(zip(OPERATIONS, ["qkv", "attended", "stream", "activated", "stream"], strict=True))
    assert decoder.written == [{written[name]} for name in OPERATIONS] * config.num_layers


@pytest.mark.parametrize("name", ["llama-biases", "gemma3", "gpt-oss", "phi4-mini", "quantised", "wide"])
def test_models_that_it_cannot_run_are_named(tmp_path: Path, name: str) -> None:
    """`phi4-mini` it can."""
    known = {variant.name: variant for variant in (*ARCHITECTURES, *VARIANTS)}
    known["quantised"] = Variant("qwen3", "Qwen3ForCausalLM", {"hidden_size": 64, "intermediate_size": 128, **GROUPED})
    known["wide"] = Variant("qwen3", "Qwen3ForCausalLM", {"intermediate_size": 4104, **GROUPED})
    model, _ = load(tmp_path, known[name], quantization="int8" if name == "quantised" else "auto")
    assert PersistentDecoder.supports(model) == (name == "phi4-mini")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_replayed_launch_gives_what_single_launches_do(tmp_path: Path, dtype: torch.dtype) -> None:
    """A missing wait would show now and then: the same step, five hundred times, in a CUDA graph."""
    variant = Variant("qwen3", "Qwen3ForCausalLM", {"hidden_size": 1024, "intermediate_size": 3072, **GROUPED})
    model, config = load(tmp_path, variant, dtype)
    runner = PagedRunner.of(model, config, dtype, 1, 160, 8)
    runner.step({0: random_tokens(150)[0]})
    logits, inputs, decoder = _step(runner, model)
    graph = CudaGraphCapture(DEVICE)(lambda: (decoder(inputs),))
    for _ in range(500):
        graph.replay()
        assert torch.equal(graph.outputs[0], logits)
    single = ByInstruction(model, runner.cache)
    assert torch.equal(single(inputs), logits)
    plain = SingleTokenDecoder(model, runner.cache)(inputs)
    error = ((logits - plain).float().norm() / plain.float().norm()).item()
    assert error < (1e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.gpu
def test_times_are_in_order(tmp_path: Path) -> None:
    model, config = load(tmp_path, QWEN3)
    runner = PagedRunner.of(model, config, torch.float32, 1, 16, 8)
    _, inputs, decoder = _step(runner, model)
    machine = decoder.persistent
    times = torch.zeros((machine.count, machine.programs, 3), dtype=torch.int64, device=DEVICE)
    decoder.run_instructions(inputs, 0, machine.count, times)
    began, ready, done = times.unbind(-1)
    assert (began[1:] >= done[:-1]).all()
    linear = [number for number in range(machine.count) if OPERATIONS[number % len(OPERATIONS)] != "attention"]
    assert (ready[linear] >= began[linear]).all()
    assert (done[linear] >= ready[linear]).all()
    late = done.max(dim=1).values  # nobody reads what is not there
    after = [number for number in linear if number > 0]
    assert (ready[after] >= late[[number - 1 for number in after], None] - 1000).all(), (
        "the clock counts in microseconds"
    )


def _step(runner: PagedRunner, model: CausalLM) -> tuple[torch.Tensor, DeviceBatch, PersistentDecoder]:
    """A step of one token, its inputs, and the decoder that has computed it."""
    seen: list[DeviceBatch] = []
    decoder = PersistentDecoder(model, runner.cache)

    class Noting(torch.nn.Module):
        def forward(self, inputs: DeviceBatch) -> torch.Tensor:
            seen.append(inputs)
            return decoder(inputs)

    runner.model = Noting()
    logits = runner.step({0: np.array([7], dtype=np.int32)})[0]
    return logits, seen[0], decoder
