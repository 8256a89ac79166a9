"""Chapter 5: one batch through the model, and from logits to tokens."""

from minisgl.engine.engine import Engine, PendingStep
from minisgl.engine.sampler import SAMPLERS, DefaultSampler, SampledTokens, Sampler
from minisgl.engine.sampling_stages import SamplingInputs, SamplingRows, TokenHistory
from minisgl.engine.sampling_table import SamplingTable

__all__ = [
    "SAMPLERS",
    "DefaultSampler",
    "Engine",
    "PendingStep",
    "SampledTokens",
    "Sampler",
    "SamplingInputs",
    "SamplingRows",
    "SamplingTable",
    "TokenHistory",
]
