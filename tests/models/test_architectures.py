"""The oracle: logits of every architecture equal those of transformers, however the work is cut into steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from minisgl.errors import ConfigError, ModelLoadError
from minisgl.layers.attention import Attention
from minisgl.layers.mlp import GatedMLP
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rotary import Rotation
from minisgl.layers.sharding import Communicator
from minisgl.llm import LLM
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import CausalLM, attention_spec
from minisgl.models.loader import load_model
from tests.model_zoo import ARCHITECTURES, Variant, hf_logits, random_tokens, run_dense, tiny_checkpoint
from tests.paged_runner import PagedRunner

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}


def _cases() -> list[Any]:
    """Both dtypes of each variant. With a soft cap on scores, transformers takes its softmax in float32 alone."""
    dtypes = {"float32": torch.float32, "float64": torch.float64}
    return [
        pytest.param((variant, dtype), id=f"{variant.name}-{name}")
        for variant in ARCHITECTURES
        for name, dtype in dtypes.items()
        if not (variant.overrides.get("attn_logit_softcapping") and dtype == torch.float64)
    ]


@pytest.fixture(params=_cases())
def case(request: pytest.FixtureRequest) -> tuple[Variant, torch.dtype]:
    chosen: tuple[Variant, torch.dtype] = request.param
    return chosen


@pytest.fixture
def variant(case: tuple[Variant, torch.dtype]) -> Variant:
    return case[0]


@pytest.fixture
def dtype(case: tuple[Variant, torch.dtype]) -> torch.dtype:
    return case[1]


@pytest.fixture
def pair(variant: Variant, dtype: torch.dtype, tmp_path: Path) -> tuple[PreTrainedModel, torch.nn.Module, ModelConfig]:
    path, hf = variant.checkpoint(tmp_path)
    config = ModelConfig.from_dir(path)
    if dtype == torch.float64:
        _make_double(hf)
    return hf, load_model(path, config, dtype, CPU), config


def _make_double(hf: PreTrainedModel) -> None:
    """transformers rounds to float32 in norms, routers and a factor even in float64; lift that for the oracle."""
    hf.double()
    for module in hf.modules():
        if type(module).__name__.startswith("Gemma") and type(module).__name__.endswith("RMSNorm"):
            _replace_forward(module, lambda x, m=module: F.rms_norm(x, m.weight.shape, 1 + m.weight, m.eps))
        elif type(module).__name__.endswith("RMSNorm"):
            _replace_forward(module, lambda x, m=module: F.rms_norm(x, m.weight.shape, m.weight, m.variance_epsilon))
        if type(module).__name__ == "Gemma3TextScaledWordEmbedding":
            module.embed_scale.fill_(module.scalar_embed_scale)
        if type(module).__name__ == "Qwen3MoeTopKRouter":
            _replace_forward(module, lambda x, m=module: _route(m, x))


def _replace_forward(module: torch.nn.Module, forward: Any) -> None:
    module.forward = forward


def _route(router: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = F.linear(x, router.weight)
    weights, experts = logits.softmax(-1).topk(router.top_k)
    return logits, weights / weights.sum(-1, keepdim=True) if router.norm_topk_prob else weights, experts


def assert_equal(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> None:
    assert ours.dtype == dtype
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max()) < TOLERANCE[dtype]


def test_whole_prompts(pair: tuple[PreTrainedModel, torch.nn.Module, ModelConfig], dtype: torch.dtype) -> None:
    hf, model, config = pair
    prompts = random_tokens(23, 1, 9)
    paged = PagedRunner.of(model, config, dtype, rows=3, max_len=32, page_size=4).step(dict(enumerate(prompts)))
    for prompt, dense_logits, paged_logits in zip(prompts, run_dense(model, *prompts), paged, strict=True):
        theirs = hf_logits(hf, prompt)
        assert_equal(dense_logits, theirs, dtype)
        assert_equal(paged_logits, theirs, dtype)


@pytest.mark.parametrize("page_size", [1, 16])
def test_chunks_decodes_and_mixed_steps(
    pair: tuple[PreTrainedModel, torch.nn.Module, ModelConfig], dtype: torch.dtype, page_size: int
) -> None:
    hf, model, config = pair
    sequences = random_tokens(30, 21, 12)
    runner = PagedRunner.of(model, config, dtype, rows=3, max_len=32, page_size=page_size)
    for tokens, logits in zip(sequences, runner.in_pieces(*sequences), strict=True):
        assert_equal(logits, hf_logits(hf, tokens), dtype)


class Olmo2Attention(Attention):
    def __init__(self, config: ModelConfig, layer_id: int) -> None:
        spec = attention_spec(config, layer_id)
        super().__init__(config.hidden_size, spec)
        self.q_norm = RMSNorm(spec.num_heads * spec.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(spec.num_kv_heads * spec.head_dim, config.rms_norm_eps)

    def normalize(self, qk: torch.Tensor) -> torch.Tensor:
        assert self.q_norm is not None
        assert self.k_norm is not None
        heads = self.spec.num_heads
        q, k = qk[:, :heads].flatten(1), qk[:, heads:].flatten(1)
        return torch.cat([self.q_norm(q), self.k_norm(k)], dim=1).view_as(qk)


class Olmo2Layer(nn.Module):
    def __init__(self, config: ModelConfig, layer_id: int, communicator: Communicator) -> None:
        super().__init__()
        self.self_attn = Olmo2Attention(config, layer_id)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, residual: None, rotation: Rotation) -> tuple[torch.Tensor, None]:
        x = x + self.post_attention_layernorm(self.self_attn(x, rotation))
        return x + self.post_feedforward_layernorm(self.mlp(x)), None


class Olmo2(CausalLM):
    layer = Olmo2Layer


OLMO2 = f"{__name__}:Olmo2"


def test_a_checkpoint_alone_does_not_find_it(tmp_path: Path) -> None:
    path, _ = tiny_checkpoint(tmp_path, "StableLmForCausalLM")
    with pytest.raises(ModelLoadError, match=r"'StableLmForCausalLM' is not supported.*architecture='module:Class'"):
        ModelConfig.from_dir(path)


def test_named_by_the_option_it_equals_transformers(tmp_path: Path) -> None:
    path, hf = tiny_checkpoint(tmp_path, "Olmo2ForCausalLM")
    config = ModelConfig.from_dir(path, OLMO2)
    model = load_model(path, config, torch.float32, torch.device("cpu"))
    (prompt,) = random_tokens(20)
    expected = hf_logits(hf, prompt)
    assert float((run_dense(model, prompt)[0] - expected).abs().max()) < 1e-4
    runner = PagedRunner.of(model, config, torch.float32, rows=1, max_len=20, page_size=4)
    chunks = [runner.step({0: chunk})[0] for chunk in (prompt[:9], prompt[9:19], prompt[19:])]
    assert float((torch.cat(chunks) - expected).abs().max()) < 1e-4


def test_an_engine_takes_it_from_its_options(tmp_path: Path) -> None:
    path, _ = tiny_checkpoint(tmp_path, "Olmo2ForCausalLM")
    llm = LLM(path, device="cpu", architecture=OLMO2, load_format="dummy", num_pages=8)
    assert type(llm.engine.model) is Olmo2


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("StableLmForCausalLM", "architecture: unknown name 'StableLmForCausalLM'; choose from Gemma2ForCausalLM"),
        (f"{__name__}:Olmo3", "architecture: cannot import"),
    ],
)
def test_other_names_are_refused(tmp_path: Path, architecture: str, message: str) -> None:
    path, _ = tiny_checkpoint(tmp_path, "Olmo2ForCausalLM")
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dir(path, architecture)
