"""The head of EAGLE-3 as its training sees it, and its checkpoint in the public format."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class HeadConfig:
    """Sizes of a head; what is not here is the model's."""

    draft_vocab_size: int = 8192  # the tokens that it can guess: those that the model says most often
    intermediate_size: int = 768  # of its MLP; the default model's own is twice as wide


class RMSNorm(nn.RMSNorm):
    """A norm in the dtype of its input, which autocast does not see to."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Head(nn.Module):
    """The head of EAGLE-3, for training: whole sequences, plain PyTorch. Parameters are named as in checkpoints.

    At position i it sees token i + 1 and the model's hidden states of position i, and guesses token i + 2.
    """

    def __init__(self, model: PretrainedConfig, config: HeadConfig) -> None:
        super().__init__()
        size = model.hidden_size
        self.config = config
        self.model_config = model
        self.num_heads, self.num_kv_heads = model.num_attention_heads, model.num_key_value_heads
        self.head_dim = getattr(model, "head_dim", None) or size // model.num_attention_heads
        self.eps = model.rms_norm_eps
        self.fc = nn.Linear(3 * size, size, bias=False)
        self.midlayer = nn.ModuleDict(
            {
                "input_layernorm": RMSNorm(size, self.eps),
                "hidden_norm": RMSNorm(size, self.eps),
                "self_attn": nn.ModuleDict(
                    {
                        "q_proj": nn.Linear(2 * size, self.num_heads * self.head_dim, bias=False),
                        "k_proj": nn.Linear(2 * size, self.num_kv_heads * self.head_dim, bias=False),
                        "v_proj": nn.Linear(2 * size, self.num_kv_heads * self.head_dim, bias=False),
                        "o_proj": nn.Linear(self.num_heads * self.head_dim, size, bias=False),
                    }
                ),
                "post_attention_layernorm": RMSNorm(size, self.eps),
                "mlp": nn.ModuleDict(
                    {
                        "gate_proj": nn.Linear(size, config.intermediate_size, bias=False),
                        "up_proj": nn.Linear(size, config.intermediate_size, bias=False),
                        "down_proj": nn.Linear(config.intermediate_size, size, bias=False),
                    }
                ),
            }
        )
        self.norm = RMSNorm(size, self.eps)
        theta = model.rope_parameters["rope_theta"]
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.float32) / self.head_dim
        self.register_buffer("inv_freq", theta**-exponents, persistent=False)

    def initialise(self, model: PreTrainedModel) -> None:
        """Start as a head that passes the last of the three hidden states on, which is not far from the final one."""
        with torch.no_grad():
            for projection in (self.midlayer["self_attn"]["o_proj"], self.midlayer["mlp"]["down_proj"]):
                projection.weight.normal_(std=0.002)
            size = len(self.fc.weight)
            self.fc.weight.normal_(std=0.002)
            self.fc.weight[:, -size:] += torch.eye(size, device=self.fc.weight.device)
            self.norm.weight.copy_(model.model.norm.weight)

    def unroll(self, aux: torch.Tensor, embeds: torch.Tensor, table: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """Logits of ``steps`` guesses in a row from every position: [B, L, draft_vocab_size] each.

        Step j at index i stands at position i + j: it has seen the model's hidden states up to position i, and its own
        output for the j positions behind. So its keys are those of step 0 up to index i, then one of each step since.

        Args:
            aux: [B, L, 3 × hidden_size] hidden states of the model.
            embeds: [B, L + steps, hidden_size] embeddings of the tokens.
            table: [draft_vocab_size, hidden_size] the rows of the model's LM head that the head can guess.
        """
        layer, length = self.midlayer, aux.shape[1]
        attn = layer["self_attn"]
        hidden = self.fc(aux)
        blocked = torch.ones(length, length, dtype=torch.bool, device=aux.device).triu(1)
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        logits: list[torch.Tensor] = []
        for step in range(steps):
            token = embeds[:, step + 1 : step + 1 + length]
            x = torch.cat([layer["input_layernorm"](token), layer["hidden_norm"](hidden)], dim=-1)
            q = self._rotate(self._split(attn["q_proj"](x), self.num_heads), step)
            keys.append(self._grouped(self._rotate(self._split(attn["k_proj"](x), self.num_kv_heads), step)))
            values.append(self._grouped(self._split(attn["v_proj"](x), self.num_kv_heads)))
            scores = (q @ keys[0].transpose(-1, -2)).float().masked_fill(blocked, -torch.inf)
            own = [(q * key).sum(-1, keepdim=True).float() for key in keys[1:]]
            weights = (torch.cat([scores, *own], dim=-1) * self.head_dim**-0.5).softmax(-1).to(x.dtype)
            attended = weights[..., :length] @ values[0]
            for index, value in enumerate(values[1:]):
                attended = attended + weights[..., length + index, None] * value
            hidden = hidden + attn["o_proj"](attended.transpose(1, 2).flatten(2))
            x, mlp = layer["post_attention_layernorm"](hidden), layer["mlp"]
            hidden = hidden + mlp["down_proj"](F.silu(mlp["gate_proj"](x)) * mlp["up_proj"](x))
            logits.append(self.norm(hidden) @ table.T)
        return logits

    def _split(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)

    def _grouped(self, x: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1)

    def _rotate(self, x: torch.Tensor, shift: int) -> torch.Tensor:
        positions = torch.arange(shift, shift + x.shape[2], device=x.device, dtype=torch.float32)
        angles = positions[:, None] * self.inv_freq
        cos, sin = (torch.cat([f(angles)] * 2, dim=-1).to(x.dtype) for f in (torch.cos, torch.sin))
        left, right = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-right, left], dim=-1) * sin


def hidden_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers whose inputs the head sees: an early one, the middle, and a late one, as EAGLE-3 chooses them."""
    return 2, num_layers // 2, num_layers - 3


def save(head: Head, tokens: torch.Tensor, directory: Path) -> int:
    """Write ``config.json`` and ``model.safetensors`` in bfloat16, and return the bytes of both."""
    model, layers = head.model_config, hidden_layers(head.model_config.num_hidden_layers)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": model.hidden_size,
        "intermediate_size": head.config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": head.num_heads,
        "num_key_value_heads": head.num_kv_heads,
        "head_dim": head.head_dim,
        "vocab_size": model.vocab_size,
        "draft_vocab_size": len(tokens),
        "max_position_embeddings": model.max_position_embeddings,
        "rms_norm_eps": head.eps,
        "rope_theta": model.rope_parameters["rope_theta"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        # Counted as the outputs of layers: one less than the layer whose input it is.
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in layers],
        },
    }
    tensors = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in head.state_dict().items()}
    ids = tokens.cpu()
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = torch.zeros(model.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return sum((directory / name).stat().st_size for name in ("config.json", "model.safetensors"))
