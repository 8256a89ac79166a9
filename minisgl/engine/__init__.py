"""Chapter 5: one batch through the model, and from logits to tokens."""

from minisgl.engine.engine import Engine, PendingStep
from minisgl.engine.sampler import SAMPLERS, DefaultSampler, SampledTokens, Sampler
from minisgl.engine.sampling_stages import DeviceSampling, HostSampling, TokenHistory
from minisgl.engine.sampling_table import SamplingTable

__all__ = [
    "SAMPLERS",
    "DefaultSampler",
    "DeviceSampling",
    "Engine",
    "HostSampling",
    "PendingStep",
    "SampledTokens",
    "Sampler",
    "SamplingTable",
    "TokenHistory",
]
