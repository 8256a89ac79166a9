"""Ranges for profilers: each is popped, in the order of a stack, whatever happens to a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minisgl.errors import ConfigError
from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams
from tests.model_zoo import tiny_checkpoint
from tests.tiny_text_model import directed_llm

OPTIONS = {"device": "cpu", "num_pages": 64, "nvtx": True}


class Ranges:
    """What a profiler sees: paths of names, such as ``launch/compute``."""

    def __init__(self) -> None:
        self.stack: list[str] = []
        self.seen: list[str] = []

    def push(self, name: str) -> None:
        self.stack.append(name.split(" ")[0])
        self.seen.append("/".join(self.stack))

    def pop(self) -> None:
        self.stack.pop()


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> Ranges:
    seen = Ranges()
    monkeypatch.setattr(torch.cuda.nvtx, "mark", lambda name: None)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", seen.push)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", seen.pop)
    return seen


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory, _ = tiny_checkpoint(tmp_path_factory.mktemp("model"), "LlamaForCausalLM")
    return directory


@pytest.mark.parametrize("overlap", [False, True])
def test_phases_and_layers_have_ranges(path: Path, ranges: Ranges, overlap: bool) -> None:
    llm = LLM(path, overlap=overlap, **OPTIONS)
    llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert ranges.stack == []
    phases = [name for name in ranges.seen if "/" not in name]
    assert {*phases} == {"schedule", "launch", "wait", "process"}
    layers = [name.removeprefix("launch/compute/") for name in ranges.seen if "layers" in name]
    parts = ("", "/layers.{0}.self_attn", "/layers.{0}.mlp")
    once = [f"layers.{layer}" + part.format(layer) for layer in range(2) for part in parts]
    assert layers == once * phases.count("launch")


def test_a_step_that_fails_leaves_no_range_open(path: Path, ranges: Ranges) -> None:
    llm = directed_llm(path, **OPTIONS)
    broken = llm.core.engine.model.model.layers[1].mlp
    handle = broken.register_forward_pre_hook(lambda *_: 1 / 0)
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3))
    assert output.finish_reason == "error"
    assert ranges.stack == []
    handle.remove()
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert output.finish_reason == "length"
    assert ranges.stack == []


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [True, False])
def test_the_real_functions_take_what_is_pushed(path: Path, eager: bool) -> None:
    """Graphs are captured with ranges as well. What a profiler makes of them, only the profiler sees."""
    options = {"device": "cuda", "num_pages": 64, "enforce_eager": eager}
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    found, expected = (LLM(path, **options, nvtx=nvtx).generate([[1, 2, 3]], params)[0] for nvtx in (True, False))
    assert (found.token_ids, found.error) == (expected.token_ids, None)


def test_without_a_cuda_build_the_option_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mark(name: str) -> None:
        raise RuntimeError("NVTX functions not installed")

    monkeypatch.setattr(torch.cuda.nvtx, "mark", mark)
    with pytest.raises(ConfigError, match="nvtx: ranges need a CUDA build of PyTorch"):
        LLM(path, **OPTIONS)
