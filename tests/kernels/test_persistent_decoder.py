"""The decoder whose layers are one kernel against the plain one, and its instructions one at a time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from minisgl.batch import DeviceBatch
from minisgl.engine.cuda_graph import CudaGraphCapture
from minisgl.kernels.persistent_decoder import CLUSTER, OPERATIONS, Interpreter, PersistentKernel, PersistentShape
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
    ("variant", "programs"),
    [
        (QWEN3, 5),  # no number of rows can be divided by it
        (QWEN3, 24),  # more than some products have rows
        (BIASED, 8),
        (NAMED["mistral-window"], 2),  # a program for each KV head: no head is split
        (NAMED["smollm3"], 8),
    ],
    ids=["five programs", "many programs", "biases", "window", "layers without angles"],
)
def test_steps_give_the_logits_of_the_plain_decoder(tmp_path: Path, variant: Variant, programs: int) -> None:
    """Behind a prompt of several parts of keys, and twice in a row behind a single token."""
    model, config = load(tmp_path, variant)
    plain, fast = (PagedRunner.of(model, config, torch.float32, 2, 160, 8) for _ in range(2))
    assert PersistentDecoder.supports(model) == (DEVICE.type == "cpu"), "there is no kernel in float32"
    for runner in (plain, fast):
        runner.step({0: random_tokens(150)[0], 1: random_tokens(1)[0]})
    fast.model = PersistentDecoder(model, fast.cache, programs)
    for slot in (0, 1, 1):
        step = {slot: np.array([7 + slot], dtype=np.int32)}
        expected, logits = plain.step(step)[0], fast.step(step)[0]
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    for ours, reference in ((fast.cache.k, plain.cache.k), (fast.cache.v, plain.cache.v)):
        assert torch.equal(ours.isnan(), reference.isnan()), "the same places are written"
        torch.testing.assert_close(ours, reference, rtol=1e-3, atol=1e-3, equal_nan=True)


class Noting(PersistentDecoder):
    """Notes what each instruction has written."""

    def run_layers(self, stream: torch.Tensor, inputs: DeviceBatch) -> torch.Tensor:
        machine = self.persistent
        assert isinstance(machine, Interpreter)
        machine.stream.copy_(stream)
        buffers = {"stream": machine.stream, "qkv": machine.qkv, "attended": machine.attended}
        buffers["activated"] = machine.activated
        for name in ("qkv", "attended", "activated"):
            buffers[name].zero_()
        self.written: list[set[str]] = []
        for number in range(len(OPERATIONS) * len(self.layers)):
            before = {name: buffer.clone() for name, buffer in buffers.items()}
            machine.carry_out(number, self.token_step(inputs))
            self.written.append({name for name, buffer in buffers.items() if not torch.equal(buffer, before[name])})
        return machine.stream


def test_each_instruction_writes_one_vector(tmp_path: Path) -> None:
    model, config = load(tmp_path, QWEN3)
    whole, single = (PagedRunner.of(model, config, torch.float32, 1, 16, 8) for _ in range(2))
    whole.model = PersistentDecoder(model, whole.cache)
    decoder = Noting(model, single.cache)
    single.model = decoder
    step = {0: np.array([7], dtype=np.int32)}
    assert torch.equal(single.step(step)[0], whole.step(step)[0])
    written = dict(zip(OPERATIONS, ["qkv", "attended", "stream", "activated", "stream"], strict=True))
    assert decoder.written == [{written[name]} for name in OPERATIONS] * config.num_layers


@pytest.mark.parametrize("name", ["llama-biases", "gemma3", "gpt-oss", "phi4-mini", "quantised"])
def test_models_that_it_cannot_run_are_named(tmp_path: Path, name: str) -> None:
    """`phi4-mini` it can, on a CPU: its heads are too small for the kernel."""
    known = {variant.name: variant for variant in (*ARCHITECTURES, *VARIANTS)}
    known["quantised"] = Variant("qwen3", "Qwen3ForCausalLM", {"hidden_size": 64, "intermediate_size": 128, **GROUPED})
    model, _ = load(tmp_path, known[name], quantization="int8" if name == "quantised" else "auto")
    assert PersistentDecoder.supports(model) == (name == "phi4-mini" and DEVICE.type == "cpu")


def test_shapes_that_the_kernel_is_made_for() -> None:
    qwen = PersistentShape(28, 1024, 3072, 8, 2, 128, 16, window=0, qk_norm=True, qkv_bias=False)
    assert qwen.fits(120)
    assert not qwen.fits(56), "a cluster for each KV head"
    assert not qwen._replace(head_dim=32).fits(120)
    assert not qwen._replace(hidden=1040).fits(120), "tensor cores take 32 columns at a time"
    assert not qwen._replace(hidden=200).fits(120), "every program has rows of every weight"
    assert not qwen._replace(intermediate=30720).fits(120), "no room for a vector, or for a program's rows"
    assert qwen.stages(120) > qwen._replace(hidden=2048, intermediate=6144).stages(120)


MEDIUM = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "head_dim": 128,
    "num_hidden_layers": 3,
    "max_position_embeddings": 2048,
}
ON_A_GPU = {
    "qwen3": Variant("qwen3", "Qwen3ForCausalLM", {**MEDIUM, "num_attention_heads": 16, "num_key_value_heads": 8}),
    "uneven": Variant(
        "qwen3",
        "Qwen3ForCausalLM",
        {"hidden_size": 1312, "intermediate_size": 2016, "head_dim": 64, "num_attention_heads": 9,
         "num_key_value_heads": 3, "num_hidden_layers": 3, "max_position_embeddings": 2048},
    ),  # no width is a multiple of what is fetched at once
    "biases": Variant("qwen2", "Qwen2ForCausalLM", {**MEDIUM, "num_attention_heads": 12, "num_key_value_heads": 2}),
    "window": Variant(
        "mistral", "MistralForCausalLM",
        {**MEDIUM, "num_attention_heads": 8, "num_key_value_heads": 2, "sliding_window": 100},
    ),
    "smollm3": Variant(
        "smollm3", "SmolLM3ForCausalLM",
        {**MEDIUM, "num_attention_heads": 16, "num_key_value_heads": 4, "no_rope_layers": [1, 0, 1]},
    ),
}  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("name", list(ON_A_GPU))
def test_the_kernel_is_as_precise_as_six_kernels_a_layer(tmp_path: Path, name: str, page_size: int) -> None:
    """Behind prompts of no key, of one stage of keys and of many, against the model in float32."""
    exact, config = load(tmp_path / "exact", ON_A_GPU[name])
    model, _ = load(tmp_path / "bfloat16", ON_A_GPU[name], torch.bfloat16)
    reference = PagedRunner.of(exact, config, torch.float32, 3, 1280, page_size)
    six, one = (PagedRunner.of(model, config, torch.bfloat16, 3, 1280, page_size) for _ in range(2))
    for runner in (reference, six, one):
        runner.step({0: random_tokens(1213)[0], 1: random_tokens(33)[0]})
    assert PersistentDecoder.supports(model)
    six.model, one.model = SingleTokenDecoder(model, six.cache), PersistentDecoder(model, one.cache)
    for slot in (2, 2, 1, 0, 0):
        step = {slot: np.array([7 + slot], dtype=np.int32)}
        expected = reference.step(step)[0]
        errors = [((runner.step(step)[0] - expected).norm() / expected.norm()).item() for runner in (six, one)]
        assert errors[1] < 1.5 * errors[0] + 0.01, (slot, errors)
    for ours, theirs in ((one.cache.k, six.cache.k), (one.cache.v, six.cache.v)):
        assert torch.equal(ours.isnan(), theirs.isnan()), "the same places are written"


@pytest.mark.gpu
def test_a_replayed_launch_gives_the_same_each_time(tmp_path: Path) -> None:
    """A tag taken for another, or a place overwritten too early, would show now and then: a step, a thousand times."""
    model, config = load(tmp_path, ON_A_GPU["qwen3"], torch.bfloat16)
    runner = PagedRunner.of(model, config, torch.bfloat16, 1, 700, 16)
    runner.step({0: random_tokens(640)[0]})
    logits, inputs, decoder = _step(runner, model)
    graph = CudaGraphCapture(DEVICE)(lambda: (decoder(inputs),))
    for _ in range(1000):
        graph.replay()
        assert torch.equal(graph.outputs[0], logits)


@pytest.mark.gpu
def test_times_are_in_order(tmp_path: Path) -> None:
    model, config = load(tmp_path, ON_A_GPU["qwen3"], torch.bfloat16)
    runner = PagedRunner.of(model, config, torch.bfloat16, 1, 16, 8)
    _, inputs, decoder = _step(runner, model)
    machine = decoder.persistent
    assert isinstance(machine, PersistentKernel)
    assert machine.programs % CLUSTER == 0
    times = torch.zeros((len(OPERATIONS) * config.num_layers, machine.programs, 3), dtype=torch.int64, device=DEVICE)
    machine.run(decoder.token_step(inputs), times)
    began, ready, done = times.unbind(-1)
    assert (began[1:] >= done[:-1]).all()
    linear = [number for number in range(len(times)) if OPERATIONS[number % len(OPERATIONS)] != "attention"]
    assert (ready[linear] >= began[linear]).all()
    assert (done[linear] >= ready[linear]).all()
    for number in linear:
        if OPERATIONS[number % len(OPERATIONS)] in ("gate_up_proj", "down_proj"):  # nobody reads what is not there
            late = done[number - 1].max()
            assert (ready[number] >= late - 2000).all(), "a thread's clock, taken behind its stores: 2 µs are allowed"


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
