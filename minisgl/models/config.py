"""The configuration of a model, read from its ``config.json``, and the table of architectures."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from minisgl.errors import ModelLoadError
from minisgl.layers.rotary import NO_POSITIONS, ROPE_TYPES, RopeSettings
from minisgl.layers.sharding import SINGLE_RANK, Communicator
from minisgl.registry import Registry, resolve

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The mixture of experts of a model."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int  # width of one expert
    normalize: bool  # scale a token's expert weights so that they sum to 1
    layers: tuple[bool, ...]  # [num_layers] which layers have experts; the others have a dense MLP


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and options of a decoder; `ModelLoadError` for sizes that cannot work together."""

    architecture: str  # a name in `MODELS`, or "module:Class"
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # `num_heads × head_dim` need not be `hidden_size`
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int  # after stretching by YaRN
    rms_norm_eps: float
    rope: RopeSettings  # of the layers that `layer_ropes` does not give another one
    sliding_windows: tuple[int | None, ...]  # [num_layers]; None: the layer sees all positions
    tie_word_embeddings: bool
    dtype: torch.dtype  # of the checkpoint
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    moe: MoEConfig | None = None  # None: a dense model
    layer_ropes: tuple[RopeSettings, ...] = ()  # [num_layers]; empty: all layers have `rope`
    packed_attention: bool = False  # checkpoints hold q, k and v as one tensor
    packed_mlp: bool = False  # and gate and up as one
    attention_scale: float | None = None  # factor on q·k; None: head_dim ** -0.5
    attention_soft_cap: float | None = None  # scores s of attention become cap × tanh(s / cap)
    attention_sinks: bool = False  # see `AttentionSpec.sinks`
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of what each block adds to the residual stream
    logits_multiplier: float = 1.0
    logits_soft_cap: float | None = None  # logits x become cap × tanh(x / cap), as scores of attention do

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelLoadError(
                f"num_attention_heads ({self.num_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            raise ModelLoadError(f"head_dim ({self.head_dim}) must be even for the rotary embedding")
        if len(self.sliding_windows) != self.num_layers:
            raise ModelLoadError(f"{len(self.sliding_windows)} layer_types given for {self.num_layers} layers")
        if len(self.layer_ropes) not in (0, self.num_layers):
            raise ModelLoadError(f"{len(self.layer_ropes)} rotary embeddings given for {self.num_layers} layers")
        order = self.rope.head_order(self.head_dim)  # in which the loader puts the elements of all heads
        if any(rope != NO_POSITIONS and rope.head_order(self.head_dim) != order for rope in self.layer_ropes):
            raise ModelLoadError("partial_rotary_factor: all layers that are rotated must have the same")

    @property
    def longest_window(self) -> int | None:
        """Positions that the layer with the longest sliding window sees; None if some layer sees all."""
        windows = [window for window in self.sliding_windows if window is not None]
        return max(windows) if len(windows) == self.num_layers else None

    @property
    def mixed_window(self) -> int | None:
        """The longest sliding window of a model that has layers with one and layers that see all; else None."""
        windows = [window for window in self.sliding_windows if window is not None]
        return max(windows) if 0 < len(windows) < self.num_layers else None

    @property
    def attention_features(self) -> tuple[str, ...]:
        """What the attention of this model needs of a backend, as in `minisgl.context.ATTENTION_FEATURES`."""
        needs = {"soft_cap": self.attention_soft_cap is not None, "sinks": self.attention_sinks}
        return tuple(feature for feature, needed in needs.items() if needed)

    def for_sequences(self, max_seq_len: int) -> ModelConfig:
        """The config of an engine whose sequences are not longer: LongRoPE has other factors for short ones."""
        if self.rope.rope_type != "longrope":
            return self
        return replace(self, rope=replace(self.rope, scaling={**self.rope.scaling, "longest": max_seq_len}))

    @classmethod
    def from_dir(cls, path: str | Path, architecture: str = "auto") -> ModelConfig:
        """Read ``config.json`` in the directory ``path``. ``"auto"`` is the architecture that the file names.

        Raises `ConfigError` for an unknown ``architecture``, `ModelLoadError` for a file that is missing, invalid or
        asks for something that is not supported.
        """
        file = Path(path) / "config.json"
        named = _architecture(file)
        if architecture == "auto":
            # A checkpoint chooses from the table alone, since an import path in it could run any code.
            if named not in MODELS:
                raise ModelLoadError(
                    f"{file}: architecture {named!r} is not supported; choose one of {', '.join(MODELS)}, or give the "
                    "option architecture='module:Class' with a class of your own"
                )
            architecture = named
        try:  # transformers knows the spellings that older checkpoints use for a field
            from transformers import AutoConfig  # here, since it takes seconds and ranks do without it

            whole = AutoConfig.from_pretrained(path, local_files_only=True)
            hf = whole.get_text_config()  # of a model that also looks at images, what it does with text
        except Exception as error:  # transformers has no base class for what a config can raise
            raise ModelLoadError(f"{file}: not a valid config: {error}") from error
        model = resolve("architecture", architecture, MODELS)
        hidden_act = model.hidden_act
        named_act = getattr(hf, "hidden_activation", None) or getattr(hf, "hidden_act", hidden_act)
        if named_act != hidden_act:
            raise ModelLoadError(f"{file}: hidden_act {named_act!r} is not supported, only {hidden_act!r}")
        try:
            differences = model.differences(hf)
            rope = differences.get("rope") or rope_settings(hf)
        except ModelLoadError as error:
            raise ModelLoadError(f"{file}: {error}") from None
        fields: dict[str, Any] = {
            "architecture": architecture,
            "hidden_size": hf.hidden_size,
            "num_layers": hf.num_hidden_layers,
            "num_heads": hf.num_attention_heads,
            "num_kv_heads": hf.num_key_value_heads,
            "head_dim": getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
            "intermediate_size": hf.intermediate_size,
            "vocab_size": hf.vocab_size,
            "max_position_embeddings": _max_positions(hf, rope),
            "rms_norm_eps": hf.rms_norm_eps,
            "rope": rope,
            "sliding_windows": (None,) * hf.num_hidden_layers,
            "tie_word_embeddings": hf.tie_word_embeddings,
            "dtype": hf.dtype or whole.dtype or torch.float32,
        }
        return cls(**(fields | differences))


class Architecture(Protocol):
    """Builds models of one architecture: normally a subclass of `minisgl.models.decoder.CausalLM`."""

    hidden_act: str
    """The activation of the MLPs, as ``config.json`` calls it. A checkpoint with another one is refused."""

    def __call__(self, config: ModelConfig, communicator: Communicator = SINGLE_RANK) -> nn.Module:
        """Build this rank's shard of the model; on the meta device its parameters take no memory."""
        ...

    @staticmethod
    def differences(hf: PretrainedConfig) -> dict[str, Any]:
        """Fields of `ModelConfig` in which this architecture differs from the plain decoder."""
        ...


MODELS: Registry[Architecture] = {
    "LlamaForCausalLM": "minisgl.models.architectures:Llama",
    "MistralForCausalLM": "minisgl.models.architectures:Mistral",
    "Qwen2ForCausalLM": "minisgl.models.architectures:Qwen2",
    "Qwen3ForCausalLM": "minisgl.models.architectures:Qwen3",
    "Qwen3MoeForCausalLM": "minisgl.models.architectures:Qwen3Moe",
    "SmolLM3ForCausalLM": "minisgl.models.architectures:SmolLM3",
    "Olmo2ForCausalLM": "minisgl.models.architectures:Olmo",
    "Olmo3ForCausalLM": "minisgl.models.architectures:Olmo3",
    "GraniteForCausalLM": "minisgl.models.architectures:Granite",
    "GraniteMoeHybridForCausalLM": "minisgl.models.architectures:Granite4",
    "Phi3ForCausalLM": "minisgl.models.architectures:Phi3",
    "Gemma2ForCausalLM": "minisgl.models.architectures:Gemma2",
    "Gemma3ForCausalLM": "minisgl.models.architectures:Gemma3",
    "Glm4ForCausalLM": "minisgl.models.architectures:Glm4",
    "GptOssForCausalLM": "minisgl.models.architectures:GptOss",
    "Mistral3ForConditionalGeneration": "minisgl.models.architectures:Mistral3",
    "Gemma3ForConditionalGeneration": "minisgl.models.architectures:Gemma3OfImages",
}


def _architecture(file: Path) -> str:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelLoadError(f"{file}: no such file; a model directory must contain a config.json") from None
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file}: cannot be read as JSON: {error}") from error
    names = config.get("architectures") if isinstance(config, dict) else None
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelLoadError(f"{file}: 'architectures' must be a list with the name of the model's class")
    name: str = names[0]
    return name


def rope_settings(
    hf: PretrainedConfig, layer_type: str | None = None, partial: bool = False, interleaved: bool = False
) -> RopeSettings:
    """The ``rope_parameters`` of a config, or of one type of layers. ``partial``: the model may rotate part of a head.

    Raises `ModelLoadError` for a type that we do not know, or a part where the model has none.
    """
    parameters = dict(hf.rope_parameters if layer_type is None else hf.rope_parameters[layer_type])
    rope_type = parameters.pop("rope_type", None)
    if rope_type not in ROPE_TYPES:
        raise ModelLoadError(f"rope_type {rope_type!r} is not supported; choose one of {', '.join(ROPE_TYPES)}")
    rotated = parameters.pop("partial_rotary_factor", 1.0)
    if rotated != 1.0 and not partial:
        raise ModelLoadError("partial_rotary_factor is not supported, only whole heads are rotated")
    parameters.pop("type", None)
    return RopeSettings(rope_type, float(parameters.pop("rope_theta")), parameters, rotated, interleaved)


def _max_positions(hf: PretrainedConfig, rope: RopeSettings) -> int:
    limit: int = hf.max_position_embeddings
    if rope.rope_type != "yarn":
        return limit
    # Users often switch YaRN on by hand, and leave max_position_embeddings at the original context.
    return max(limit, int(rope.scaling["factor"] * rope.scaling["original_max_position_embeddings"]))
