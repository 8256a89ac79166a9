"""EAGLE-3 (Li et al. 2025): one decoder layer that goes on from the model's hidden states."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from minisgl.attention.select import attention_choice, select_backend
from minisgl.batch import Batch, DeviceBatch, to_device
from minisgl.config import EngineConfig
from minisgl.drafters.model import draft_config, most_tokens, single_engine
from minisgl.drafters.protocol import DraftRow, DraftTarget
from minisgl.drafters.sequences import DraftSequences
from minisgl.engine.build import capture_runner
from minisgl.engine.device_state import DeviceState
from minisgl.engine.engine import Engine
from minisgl.engine.hidden_states import HiddenStates
from minisgl.engine.model_runner import ModelRunner
from minisgl.engine.sampler import SAMPLERS, Sampler
from minisgl.errors import ConfigError, ModelLoadError
from minisgl.kvcache.pool import KVCache
from minisgl.kvcache.sizing import page_bytes
from minisgl.layers.attention import Attention
from minisgl.layers.linear import Linear, QKVParallelLinear
from minisgl.layers.mlp import GatedMLP
from minisgl.layers.norm import RMSNorm
from minisgl.layers.quantization import QuantizedWeight
from minisgl.layers.rotary import Rotary, Rotation
from minisgl.layers.sharding import SINGLE_RANK, Shard
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import CausalLM, attention_spec, prepack_weights
from minisgl.models.fusions import LAYER_FUSIONS, fuse_layers, select_fusions
from minisgl.models.hub import resolve_model
from minisgl.models.loader import INDEX_FILE, SINGLE_FILE, load_weights, read_headers
from minisgl.registry import build
from minisgl.request import Int32Array

OF_DEFAULT_MODEL = Path(__file__).with_name("default")
"""The checkpoint of the default model's head, which ``make drafter`` writes."""
_ARCHITECTURE = "LlamaForCausalLMEagle3"
_PLAIN = "LlamaForCausalLM"  # what many published heads say that they are; ``draft_vocab_size`` tells them from a model
_CONVERT = (
    'python -c "import torch, safetensors.torch as s; '
    f"s.save_file(torch.load('pytorch_model.bin', weights_only=True), '{SINGLE_FILE}')\""
)
_TOKENS_ON_CPU = 1024  # most tokens that a call may read there


class EagleDrafter:
    """Drafts with a head that was trained for the model: it reads three of its layers' hidden states.

    The head is an engine of its own with one layer and as many KV pages as the model's. At position i it is fed token
    i + 1, with the model's hidden states of position i where the token is verified, else with its own output. So what
    it computed behind a draft is computed again once the token is verified.

    ``draft_model`` is a directory or hub id with a checkpoint in the format of EAGLE-3; None is the head of the default
    model. Without an LM head of its own, it guesses with the model's. Raises `ConfigError` with several ranks, for a
    head of another vocabulary or hidden size, and `ModelLoadError` for a damaged one.
    """

    def __init__(self, target: DraftTarget) -> None:
        engine = single_engine(target)
        checkpoint = EagleCheckpoint(target.config)
        target.check_fits(vocab_size=checkpoint.model.vocab_size, hidden_size=checkpoint.model.hidden_size)
        assert engine.hidden_states is not None, "the engine was built for this drafter"
        self._states: HiddenStates = engine.hidden_states
        self._target_pages = engine.runner.state.page_table
        self._head, own = _build(checkpoint, target, engine)
        self.sequences = DraftSequences(
            own, most_tokens(own.config, engine, _TOKENS_ON_CPU), keeps_drafts=False, prepare=self._read
        )

    @staticmethod
    def hidden_layers(config: EngineConfig, num_layers: int) -> tuple[int, ...]:
        """Layers of the model whose inputs the head reads."""
        return EagleCheckpoint(config).hidden_layers(num_layers)

    def propose(self, rows: Sequence[DraftRow]) -> list[Int32Array]:
        # The head's tokens are one ahead of its positions. Of the last token there are no hidden states yet.
        return self.sequences.draft([replace(row, tokens=row.tokens[1:]) for row in rows])

    def finish(self, uid: int, prompt_len: int, tokens: Int32Array) -> None:
        """Free the request's pages."""
        self.sequences.finish(uid)

    @torch.inference_mode()
    def _read(self, batch: Batch, rows: Sequence[DraftRow]) -> None:
        """Give the head the model's hidden states of the positions that it is fed."""
        slots = np.repeat(np.array([row.slot for row in rows], dtype=np.int32), batch.q_lens)
        arrays = {"slots": slots, "positions": batch.positions, "out_locs": batch.out_locs}
        at = to_device(arrays, self._target_pages.device)
        page_size = self.sequences.engine.config.page_size
        pages = self._target_pages[at["slots"], at["positions"] // page_size]
        self._head.read(self._states.values[pages * page_size + at["positions"] % page_size], at["out_locs"])


class EagleCheckpoint:
    """The config of a head: an EAGLE-3 checkpoint's ``config.json``."""

    def __init__(self, config: EngineConfig) -> None:
        if config.draft_model is None and config.model != "default":
            raise ConfigError("draft_model: drafter='eagle' needs a head that was trained for this model; name one")
        if config.draft_model is None and not (OF_DEFAULT_MODEL / "config.json").is_file():
            raise ConfigError(f"draft_model: {OF_DEFAULT_MODEL} is not there; train the head with 'make drafter'")
        self.path = OF_DEFAULT_MODEL if config.draft_model is None else resolve_model(config.draft_model)
        file = self.path / "config.json"
        try:
            self._fields: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            named = self._fields["architectures"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ModelLoadError(f"{file}: not the config of an EAGLE-3 head: {error!r}") from error
        if named != [_ARCHITECTURE] and not (named == [_PLAIN] and self._fields.get("draft_vocab_size")):
            raise ConfigError(
                f"draft_model: {file} is of {named}, and drafter='eagle' needs {_ARCHITECTURE}, or {_PLAIN} with "
                "draft_vocab_size"
            )
        if not any((self.path / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)):
            raise ModelLoadError(
                f"{self.path}: the head has no weights in safetensors, which are needed; convert a pytorch_model.bin "
                f"in a directory with it and config.json: {_CONVERT}"
            )
        self.model = ModelConfig.from_dir(self.path, _PLAIN)
        if self.model.num_layers != 1:
            raise ConfigError(f"draft_model: {file} has {self.model.num_layers} layers, and only one is supported")
        self.draft_vocab_size = int(self._fields.get("draft_vocab_size") or self.model.vocab_size)

    def hidden_layers(self, num_layers: int) -> tuple[int, ...]:
        """Layers of a model with ``num_layers`` whose inputs the head reads; unless it says which, the usual three."""
        named = (self._fields.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        if named is None:
            return 2, num_layers // 2, num_layers - 3
        return tuple(int(layer) + 1 for layer in named)  # the checkpoint counts by outputs


class EagleLayer(nn.Module):
    """A decoder layer whose attention reads a token's embedding beside the hidden state."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = Attention(size, attention_spec(config, 0), config.qkv_bias, config.o_bias)
        heads, kv_heads = Shard.whole(config.num_heads), Shard.whole(config.num_kv_heads)
        self.self_attn.qkv_proj = QKVParallelLinear(2 * size, heads, kv_heads, config.head_dim, config.qkv_bias)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = GatedMLP(size, config.intermediate_size, config.mlp_bias)

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output of the MLP and the residual stream, both [T, hidden_size]."""
        x = torch.cat([self.input_layernorm(embeds), self.hidden_norm(hidden)], dim=-1)
        x, residual = self.post_attention_layernorm.add_and_norm(self.self_attn(x, rotation), hidden)
        return self.mlp(x), residual


class EagleHead(CausalLM):
    """The head as a model that a runner can run: its modules are named as in EAGLE-3 checkpoints.

    ``states``, [locations, hidden_size], has the hidden state that goes with the token at each location of the head's
    KV cache. `read` puts the model's there, and each step its own for the token behind each row.
    """

    def __init__(self, config: ModelConfig, num_read: int, draft_vocab_size: int | None) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.communicator = SINGLE_RANK
        self.fc = Linear(num_read * config.hidden_size, config.hidden_size)
        self.midlayer = EagleLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config.head_dim, config.max_position_embeddings, config.rope)
        self.lm_head: Linear | None = None  # type: ignore[assignment]
        if draft_vocab_size is not None:
            self.lm_head = Linear(config.hidden_size, draft_vocab_size)
        self.states: torch.Tensor
        self.page_size: int
        self.embed: Callable[[torch.Tensor], torch.Tensor]
        self.ids: torch.Tensor | None  # the model's id of each token that the head can guess; None: all

    def read(self, hidden: torch.Tensor, locations: torch.Tensor) -> None:
        """Fuse the model's hidden states, [T, layers, hidden_size], and keep them at ``locations``, int32[T]."""
        self.states.index_copy_(0, locations.long(), self.fc(hidden.flatten(1)))

    def hidden_states(self, inputs: DeviceBatch) -> torch.Tensor:
        embeds, hidden = self.embed(inputs.input_ids), self.states[inputs.out_locs]
        x, residual = self.midlayer(embeds, hidden, self.rotary(inputs.positions, embeds.dtype))
        normed, stream = self.norm.add_and_norm(x, residual)
        # The row's next token is fed with the stream that guesses it. All rows sample, so there is one for each.
        rows = inputs.logit_rows
        slots, following = inputs.slots[: len(rows)], inputs.seq_lens[: len(rows)]
        pages = inputs.page_table[slots, following // self.page_size].long()
        self.states.index_copy_(0, pages * self.page_size + following % self.page_size, stream.index_select(0, rows))
        return normed.index_select(0, rows)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, hidden_size] to [S, vocab_size] of the model; tokens that the head cannot guess have −∞."""
        assert self.lm_head is not None
        logits: torch.Tensor = self.lm_head(hidden)
        if self.ids is None:
            return logits
        return logits.new_full((len(logits), self.config.vocab_size), -torch.inf).index_copy_(1, self.ids, logits)


def _build(checkpoint: EagleCheckpoint, target: DraftTarget, engine: Engine) -> tuple[EagleHead, Engine]:
    """The head with its weights, and the engine that runs it."""
    config, dtype, device = draft_config(target), engine.dtype, engine.device
    # Published heads name the length that they were trained with, which their rotary embedding does not end at.
    model_config = replace(checkpoint.model, max_position_embeddings=target.max_seq_len)
    headers = read_headers(checkpoint.path)
    has_lm_head = "lm_head.weight" in headers
    states = cast(HiddenStates, engine.hidden_states)
    with torch.device("meta"):
        head = EagleHead(model_config, states.values.shape[1], checkpoint.draft_vocab_size if has_lm_head else None)
    others = load_weights(head, checkpoint.path, dtype, device, unused=("d2t", "t2d", "embed_tokens.weight"))
    head.eval()

    head.ids = None
    if checkpoint.draft_vocab_size < model_config.vocab_size:
        head.ids = _target_ids(others.get("d2t"), checkpoint, target.vocab_size).to(device)
    model = cast(CausalLM, engine.model)
    head.embed = model.model.embed_tokens
    if head.lm_head is None:
        with torch.device("meta"):
            head.lm_head = Linear(model_config.hidden_size, checkpoint.draft_vocab_size)
        ids = torch.arange(target.vocab_size, device=device) if head.ids is None else head.ids
        head.lm_head.weight = nn.Parameter(_lm_head_rows(model, ids), requires_grad=False)
    if device.type == "cpu":
        prepack_weights(head)
    fuse_layers(head, [name for name in select_fusions(config.fusions, device) if name in LAYER_FUSIONS])

    kv_cache = KVCache(
        num_layers=1,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        num_pages=engine.num_pages,
        page_size=config.page_size,
        dtype=dtype,
        device=device,
    )
    head.page_size = config.page_size
    head.states = states.values.new_zeros(((engine.num_pages + 1) * config.page_size, model_config.hidden_size))
    attention = select_backend(config.prefill_attention, config.decode_attention)(kv_cache)
    tables = DeviceState(config.max_running_requests, target.max_seq_len, config.page_size, engine.num_pages, device)
    sampler = build("sampler", engine.config.sampler, SAMPLERS, Sampler)
    runner = capture_runner(config, ModelRunner(head, kv_cache, attention, tables, sampler))
    bytes_of_page = page_bytes(1, model_config.num_kv_heads, model_config.head_dim, config.page_size, dtype.itemsize)
    return head, Engine(config, model_config, runner, attention_choice(config, kv_cache), bytes_of_page)


def _target_ids(d2t: torch.Tensor | None, checkpoint: EagleCheckpoint, vocab_size: int) -> torch.Tensor:
    """The model's id of each of the head's tokens. ``d2t`` says by how much it is larger."""
    count = checkpoint.draft_vocab_size
    if d2t is None or d2t.shape != (count,):
        raise ModelLoadError(f"{checkpoint.path}: 'd2t' must say which tokens of the model the head's {count} are")
    ids = d2t.long() + torch.arange(count)
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ModelLoadError(f"{checkpoint.path}: 'd2t' names tokens that are not in the vocabulary of {vocab_size}")
    return ids


def _lm_head_rows(model: CausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Rows of the model's LM head, in its dtype."""
    if model.config.tie_word_embeddings or model.lm_head is None:
        rows: torch.Tensor = model.model.embed_tokens(ids)
        return rows.clone()
    weight = model.lm_head.weight
    if isinstance(weight, QuantizedWeight):
        return weight.lookup(ids)
    return (weight.to_dense() if weight.is_mkldnn else weight)[ids]
