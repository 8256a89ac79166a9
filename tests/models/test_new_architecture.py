"""A new architecture from outside: OLMo 2 as a student would add it, held to the same oracle as ours.

It departs from Llama in its layer: the norms come after attention and MLP, and QK-norm spans all heads.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from minisgl import LLM
from minisgl.core import Communicator
from minisgl.errors import ConfigError, ModelLoadError
from minisgl.layers import Attention, GatedMLP, RMSNorm, Rotation
from minisgl.models import CausalLM, ModelConfig, attention_spec, load_model
from tests.model_zoo import hf_logits, random_tokens, run_dense, tiny_checkpoint
from tests.paged_runner import PagedRunner


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
    path, _ = tiny_checkpoint(tmp_path, "Olmo2ForCausalLM")
    with pytest.raises(ModelLoadError, match=r"'Olmo2ForCausalLM' is not supported.*architecture='module:Class'"):
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
        ("Olmo2ForCausalLM", "architecture: unknown name 'Olmo2ForCausalLM'; choose from LlamaForCausalLM"),
        (f"{__name__}:Olmo3", "architecture: cannot import"),
    ],
)
def test_other_names_are_refused(tmp_path: Path, architecture: str, message: str) -> None:
    path, _ = tiny_checkpoint(tmp_path, "Olmo2ForCausalLM")
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dir(path, architecture)
