"""Chapter 2, second half: one decoder and a table of differences. Chapter 3: its weights."""

from minisgl.models.config import MODELS, Architecture, ModelConfig, MoEConfig
from minisgl.models.decoder import CausalLM, Decoder, DecoderLayer, attention_spec
from minisgl.models.layout import block_weights
from minisgl.models.loader import load_model

__all__ = [
    "MODELS",
    "Architecture",
    "CausalLM",
    "Decoder",
    "DecoderLayer",
    "MoEConfig",
    "ModelConfig",
    "attention_spec",
    "block_weights",
    "load_model",
]
