"""A draft model: a smaller model with the same vocabulary, which says what it would say itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from minisgl.config import EngineConfig
from minisgl.drafters.protocol import DraftRow, DraftTarget
from minisgl.drafters.sequences import MOST_ROWS, DraftSequences
from minisgl.engine.build import build_engine
from minisgl.engine.engine import Engine
from minisgl.errors import ConfigError
from minisgl.kvcache.sizing import free_memory, page_bytes
from minisgl.models.config import ModelConfig
from minisgl.models.hub import resolve_model
from minisgl.request import Int32Array

_SHARE = 0.25  # of the memory that is free beside the model's engine, for the KV of drafts
_GRAPH_TOKENS = 1024  # most tokens of a step in a CUDA graph that is no decode step
_TOKENS_ON_CPU = 64  # most tokens that a call may read there, since it has a second


class ModelDrafter:
    """Drafts what the model ``draft_model`` says greedily (Leviathan et al. 2023), on the device of the other model.

    It is an `Engine` of its own, with its KV pages and its CUDA graphs. Without ``num_pages``, its pages take a quarter
    of the memory that the other engine has left: lower ``memory_ratio`` if that is too little.

    Raises `ConfigError` without ``draft_model``, with several ranks, or if the vocabularies differ.
    """

    def __init__(self, target: DraftTarget) -> None:
        engine = single_engine(target)
        options = target.config
        if options.draft_model is None:
            raise ConfigError("draft_model: drafter='model' needs a model to draft with; name one with this vocabulary")
        path = resolve_model(options.draft_model)
        model = ModelConfig.from_dir(path)
        target.check_fits(vocab_size=model.vocab_size)
        config = replace(
            draft_config(target),
            model=str(path),
            dtype=str(engine.dtype).removeprefix("torch."),
            max_seq_len=min(target.max_seq_len, model.max_position_embeddings),
        )
        if config.num_pages is None:
            config = replace(config, num_pages=_num_pages(config, model, engine))
        own = build_engine(config, path, split_windows=False)  # `DraftSequences` has one page table
        target.check_fits(vocab_size=own.model_config.vocab_size, dtype=own.dtype)
        self.sequences = DraftSequences(own, most_tokens(config, engine, _TOKENS_ON_CPU))

    def propose(self, rows: Sequence[DraftRow]) -> list[Int32Array]:
        longest = self.sequences.engine.max_seq_len
        fitting = [
            replace(row, count=min(row.count, longest - len(row.tokens)))
            for row in rows
            if len(row.tokens) < longest  # the draft model may have fewer positions
        ]
        drafts = iter(self.sequences.draft(fitting))
        return [next(drafts) if len(row.tokens) < longest else row.tokens[:0].copy() for row in rows]

    def finish(self, uid: int, prompt_len: int, tokens: Int32Array) -> None:
        """Free the request's pages."""
        self.sequences.finish(uid)


def single_engine(target: DraftTarget) -> Engine:
    """The target's engine, in this process; `ConfigError` if there are several."""
    if not isinstance(target.engine, Engine):
        raise ConfigError(
            f"drafter: {target.config.drafter!r} works beside the model, and tensor_parallel_size is "
            f"{target.config.tensor_parallel_size}; use 'ngram' or 'suffix', or one rank"
        )
    return target.engine


def draft_config(target: DraftTarget) -> EngineConfig:
    """Options of the target's engine, as far as they hold for a drafter's."""
    options, engine = target.config, single_engine(target)
    largest = min(options.max_graph_batch or MOST_ROWS, options.max_running_requests, MOST_ROWS)
    return replace(
        options,
        device=str(engine.device),
        drafter="none",
        draft_model=None,
        architecture="auto",
        quantization="auto",
        page_store="none",
        nvtx=False,
        max_graph_batch=largest,
        graph_batches=None,
        max_graph_tokens=_GRAPH_TOKENS if options.max_graph_tokens is None else options.max_graph_tokens,
    )


def most_tokens(config: EngineConfig, engine: Engine, on_cpu: int) -> int:
    """Most tokens that a call may read."""
    return config.max_prefill_tokens if engine.device.type == "cuda" else min(on_cpu, config.max_prefill_tokens)


def _num_pages(config: EngineConfig, model: ModelConfig, engine: Engine) -> int:
    bytes_of_page = page_bytes(
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        page_size=config.page_size,
        itemsize=engine.kv_cache.k.dtype.itemsize,
    )
    assert config.max_seq_len is not None
    enough = config.max_running_requests * -(-config.max_seq_len // config.page_size)
    return max(1, min(enough, int(free_memory(engine.device) * _SHARE) // bytes_of_page))
