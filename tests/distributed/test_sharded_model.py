"""A model in shares: the same scores as the whole, out of weights of which each rank has read its part."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from minisgl.errors import ConfigError, ModelLoadError
from minisgl.layers.linear import Linear
from minisgl.layers.sharding import SINGLE_RANK, Communicator
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import CausalLM, prepack_weights
from minisgl.models.fusions import fuse_layers
from minisgl.models.loader import load_model
from tests.distributed.ranks import CPU, Position, in_turns, on_ranks
from tests.model_zoo import ARCHITECTURES, Variant, hf_logits, random_tokens, run_dense, tiny_checkpoint
from tests.paged_runner import PagedRunner

PROMPTS = random_tokens(31, 1)
PIECES = random_tokens(30, 21, 12)


def load(path: Path, ranks: Communicator = SINGLE_RANK, dtype: torch.dtype = torch.float32, **options: Any) -> CausalLM:
    config = ModelConfig.from_dir(path)
    model = load_model(path, config, dtype, CPU, communicator=ranks, **options)
    assert isinstance(model, CausalLM)
    return model


@pytest.mark.parametrize("variant", ARCHITECTURES, ids=lambda variant: variant.name)
def test_scores_are_those_of_transformers(tmp_path: Path, variant: Variant) -> None:
    """Row-major and, as an engine on a CPU has them, prepacked weights; whole prompts, and over a share of the pages
    chunks, decode rows and both. Ranks agree to the bit."""
    path, hf = variant.checkpoint(tmp_path)
    expected = [hf_logits(hf, prompt) for prompt in (*PROMPTS, *PIECES)]
    for size in (2, 4):
        assert_ranks_have_the_scores(path, expected, size)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def test_eight_ranks(tmp_path: Path, architecture: str) -> None:
    """A head each, and four ranks to each KV head."""
    path, hf = tiny_checkpoint(tmp_path, architecture, num_attention_heads=8)
    assert_ranks_have_the_scores(path, [hf_logits(hf, prompt) for prompt in (*PROMPTS, *PIECES)], 8)


def assert_ranks_have_the_scores(path: Path, expected: list[torch.Tensor], size: int) -> None:
    config = ModelConfig.from_dir(path)

    def scores(ranks: Communicator) -> list[torch.Tensor]:
        model = load(path, ranks)
        paged = PagedRunner.of(model, config, torch.float32, rows=3, max_len=32, page_size=4, ranks=ranks)
        plain = run_dense(model, *PROMPTS) + paged.in_pieces(*PIECES)
        prepack_weights(model)
        assert all(module.weight.is_mkldnn for module in model.modules() if isinstance(module, Linear))
        return plain + run_dense(model, *PROMPTS)

    first, *others = on_ranks(size, scores)
    for logits, wanted in zip(first, [*expected, *expected[: len(PROMPTS)]], strict=True):
        torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-4)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_bfloat16_departs_from_one_rank_at_ties_only(tmp_path: Path) -> None:
    """Two ranks round their shares of a sum before they add them up, so their scores differ in the last bits; they may
    prefer another token only where the best two were about equal."""
    path, _ = tiny_checkpoint(tmp_path, "Qwen3ForCausalLM")
    prompts = random_tokens(300, 31, 1)

    def scores(ranks: Communicator) -> torch.Tensor:
        return torch.cat(run_dense(load(path, ranks, torch.bfloat16), *prompts)).float()

    alone = scores(SINGLE_RANK)
    first, other = on_ranks(2, scores)
    assert torch.equal(first, other)
    departs = first.argmax(-1) != alone.argmax(-1)
    best, second_best = alone.topk(2, dim=-1).values[departs].unbind(-1)
    assert departs.sum() < 0.05 * len(departs)
    assert (best - second_best < 0.1).all()


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("variant", ARCHITECTURES[:12:3], ids=lambda variant: variant.name)
def test_shares_are_slices_of_one_model(tmp_path: Path, variant: Variant, load_format: str) -> None:
    """However many ranks there are, and for dummy weights too. Whatever pads a vocabulary is zero."""
    path, _ = variant.checkpoint(tmp_path)
    whole = dict(load(path, load_format=load_format, seed=3).named_parameters())
    for size in (2, 4):
        shares = [
            dict(load(path, Position(rank, size), load_format=load_format, seed=3).named_parameters())
            for rank in range(size)
        ]
        for name, parameter in whole.items():
            pieces = [share[name] for share in shares]
            if "qkv_proj" in name or "gate_up" in name:
                assert all(piece.numel() < parameter.numel() for piece in pieces)
                assert all(_rows(piece) <= _rows(parameter) for piece in pieces)
                continue
            if pieces[0].shape == parameter.shape:  # norms, routers and biases are on all ranks
                assert all(torch.equal(piece, parameter) for piece in pieces)
                continue
            (dim,) = (dim for dim, each in enumerate(pieces[0].shape) if each != parameter.shape[dim])
            joined = torch.cat(pieces, dim)
            length = parameter.shape[dim]
            assert torch.equal(joined.narrow(dim, 0, length), parameter)
            assert not joined.narrow(dim, length, joined.shape[dim] - length).any()


def _rows(parameter: torch.Tensor) -> set[tuple[float, ...]]:
    return {tuple(row) for row in parameter.reshape(-1, parameter.shape[-1] if parameter.ndim > 1 else 1).tolist()}


def test_a_share_of_a_vocabulary_may_be_all_padding(tmp_path: Path) -> None:
    path, hf = tiny_checkpoint(tmp_path, "LlamaForCausalLM", vocab_size=5)
    prompt = PROMPTS[0] % 5
    logits = on_ranks(4, lambda ranks: run_dense(load(path, ranks), prompt)[0])
    torch.testing.assert_close(logits[3], hf_logits(hf, prompt), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("sizes", "ranks", "message"),
    [
        (
            {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3},
            2,
            "2 ranks cannot share num_attention_heads of 9",
        ),
        (
            {"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 3},
            2,
            "2 ranks cannot share num_key_value_heads of 3",
        ),
        ({"intermediate_size": 50}, 4, "4 ranks cannot share intermediate_size of 50"),
    ],
)
def test_sizes_that_do_not_divide_are_named(tmp_path: Path, sizes: dict[str, int], ranks: int, message: str) -> None:
    path, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM", **sizes)
    with pytest.raises(ConfigError, match=message):
        load(path, Position(0, ranks))


def test_problems_of_a_checkpoint_are_told_in_sizes_of_the_whole(tmp_path: Path) -> None:
    path, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.0.self_attn.q_proj.weight"]
    tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(32, 47)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(ModelLoadError) as caught:
        load(path, Position(1, 2))
    assert str(caught.value).splitlines()[1:] == [
        "  missing: model.layers.0.self_attn.q_proj.weight (32, 32)",
        "  wrong shape: model.layers.1.mlp.down_proj.weight is (32, 47) in model.safetensors, expected (32, 48)",
    ]


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_fused_layers_hold_a_share_as_well(tmp_path: Path, architecture: str) -> None:
    path, hf = tiny_checkpoint(tmp_path, architecture)

    def scores(ranks: Communicator) -> torch.Tensor:
        model: nn.Module = load(path, ranks)
        fuse_layers(model, ("norm", "activation", "experts"))
        return run_dense(model, PROMPTS[0][:9])[0]

    for logits in in_turns(2, scores):
        torch.testing.assert_close(logits, hf_logits(hf, PROMPTS[0][:9]), rtol=0, atol=1e-4)


_MEASURE = """
import sys
from pathlib import Path
import torch
from minisgl.models.config import ModelConfig
from minisgl.models.loader import load_model
from tests.distributed.ranks import Position

def status(key):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024

path, size, load_format = sys.argv[1], int(sys.argv[2]), sys.argv[3]
config = ModelConfig.from_dir(path)

def load():
    return load_model(path, config, torch.float32, torch.device("cpu"), load_format, communicator=Position(1, size))

load()  # what libraries allocate once and for all is allocated now
Path("/proc/self/clear_refs").write_text("5")  # and the peak begins anew
before = status("VmRSS")
model = load()
weights = sum(parameter.nbytes for parameter in model.parameters())
print(weights, status("VmHWM") - before)
"""


def test_peak_memory_of_a_rank_is_its_share_and_one_tensor(tmp_path: Path) -> None:
    """Files are mapped into memory, page by page as they are read, so one file's share counts as well.

    What is freed goes back to the system at once (glibc's threshold), or the peak would be one of the allocator's."""
    sizes = {"hidden_size": 512, "intermediate_size": 4096, "num_hidden_layers": 2, "num_attention_heads": 8}
    path, hf = tiny_checkpoint(tmp_path, "LlamaForCausalLM", **sizes, num_key_value_heads=8, head_dim=64)
    (path / "model.safetensors").unlink()
    hf.save_pretrained(path, max_shard_size="10MB")
    largest = max(file.stat().st_size for file in path.glob("*.safetensors"))
    whole = sum(parameter.numel() * 4 for parameter in hf.parameters())
    for load_format in ("auto", "dummy"):
        command = [sys.executable, "-c", _MEASURE, str(path), "4", load_format]
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
        measured = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        share, peak = map(int, measured.stdout.split())
        assert share < 0.27 * whole
        assert share < peak < share + largest + 0.2 * share
