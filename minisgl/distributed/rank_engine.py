"""An engine out of the parts of chapters 1 to 12, for one rank of any number, the only one included."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from minisgl.attention import attention_choice, select_backend
from minisgl.core.communicator import ALONE, Communicator
from minisgl.core.config import EngineConfig
from minisgl.distributed.communicator import peers_of
from minisgl.engine.engine import Engine, current, resolve_device
from minisgl.errors import ConfigError
from minisgl.graphs import choose_runners
from minisgl.kernels import apply_fusions, choose_fusions, choose_sampler
from minisgl.models import ModelConfig


def build_engine(config: EngineConfig, path: Path, communicator: Communicator = ALONE) -> Engine:
    """What ``config`` describes, on this rank.

    Args:
        config: options.
        path: directory of the checkpoint.
        communicator: joins the ranks.

    Raises:
        ConfigError: an option cannot work here.
        ModelLoadError: the checkpoint is not usable.
    """
    device = rank_device(config, communicator.rank)
    config = replace(config, device=str(device), sampler=choose_sampler(config.sampler, device))
    make_attention = select_backend(config.prefill_attention, config.decode_attention)
    fusions = choose_fusions(config.fusions, device)
    with current(device):
        return Engine(
            config,
            path,
            ModelConfig.from_dir(path, config.architecture),
            make_attention,
            partial(_fuse, fusions, communicator),
            choose_runners(config, device, fusions),
            communicator,
            partial(attention_choice, config),
        )


def _fuse(names: Collection[str], communicator: Communicator, model: nn.Module) -> None:
    """Exchange layers for the fused ones; the norm's is larger where ranks add up over peer memory."""
    apply_fusions(names, model)
    peers = peers_of(communicator)
    if peers is not None and "norm" in names:
        from minisgl.distributed.fuse import fuse_all_reduce

        fuse_all_reduce(model, peers)


def rank_device(config: EngineConfig, rank: int) -> torch.device:
    """The device of a rank: of several, rank r has the GPU r.

    Raises:
        ConfigError: there are fewer GPUs than ranks, or one GPU was named for several ranks.
    """
    device = resolve_device(config.device)
    if config.tensor_parallel_size == 1 or device.type == "cpu":
        return device
    if device.index is not None:
        raise ConfigError(
            f"device: {config.device!r} is one GPU and tensor_parallel_size is {config.tensor_parallel_size}; use "
            "'cuda', and choose GPUs with CUDA_VISIBLE_DEVICES"
        )
    if torch.cuda.device_count() < config.tensor_parallel_size:
        raise ConfigError(
            f"tensor_parallel_size: {config.tensor_parallel_size} ranks need as many GPUs, and "
            f"{torch.cuda.device_count()} are present"
        )
    return torch.device("cuda", rank)
