"""Chapter 1: requests, batches and the forward context, the vocabulary that all later chapters speak."""

from minisgl.core.attention import AttentionBackend, AttentionSpec
from minisgl.core.batch import Batch, DeviceBatch, build_batch
from minisgl.core.communicator import ALONE, Communicator, Place, SingleRank
from minisgl.core.config import EngineConfig
from minisgl.core.constraint import MaskMaker, TokenConstraint
from minisgl.core.context import ForwardContext, forward_context, get_forward_context
from minisgl.core.registry import Table, resolve
from minisgl.core.request import FinishReason, Request, RequestState
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.table import RunningTable

__all__ = [
    "ALONE",
    "AttentionBackend",
    "AttentionSpec",
    "Batch",
    "Communicator",
    "DeviceBatch",
    "EngineConfig",
    "FinishReason",
    "ForwardContext",
    "MaskMaker",
    "Place",
    "Request",
    "RequestState",
    "RunningTable",
    "SamplingParams",
    "SingleRank",
    "Table",
    "TokenConstraint",
    "build_batch",
    "forward_context",
    "get_forward_context",
    "resolve",
]
