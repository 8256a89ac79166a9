"""The table of architectures, by the names that ``config.json`` uses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from minisgl.core import ALONE, Communicator, Registry

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from minisgl.models.config import ModelConfig


class Architecture(Protocol):
    """What is registered: normally a subclass of `minisgl.models.CausalLM`."""

    hidden_act: str
    """The non-linearity of the MLPs, as ``config.json`` calls it. A checkpoint with another is refused."""

    def __call__(self, config: ModelConfig, communicator: Communicator = ALONE) -> nn.Module:
        """Build this rank's share of the model; under ``torch.device("meta")`` its parameters take no memory."""
        ...

    @staticmethod
    def differences(hf: PretrainedConfig) -> dict[str, Any]:
        """Fields of `ModelConfig` in which this architecture departs from the plain decoder."""
        ...


MODELS: Registry[Architecture] = Registry("model")
