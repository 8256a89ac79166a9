"""Chapter 1: requests, batches and the forward context, the vocabulary that all later chapters speak."""

from minisgl.core.attention import AttentionBackend, AttentionSpec, KVTensors, PagedAttentionBackend
from minisgl.core.batch import Batch, DeviceBatch, build_batch
from minisgl.core.communicator import SINGLE_RANK, Communicator, RankInfo, SingleRank
from minisgl.core.config import EngineConfig
from minisgl.core.constraint import MaskMaker, TokenConstraint
from minisgl.core.context import ForwardContext, forward_context, get_forward_context
from minisgl.core.registry import Table, resolve
from minisgl.core.request import FinishReason, Request, RequestState
from minisgl.core.sampling_params import SamplingParams
from minisgl.core.table import RunningTable

__all__ = [
    "SINGLE_RANK",
    "AttentionBackend",
    "AttentionSpec",
    "Batch",
    "Communicator",
    "DeviceBatch",
    "EngineConfig",
    "FinishReason",
    "ForwardContext",
    "KVTensors",
    "MaskMaker",
    "PagedAttentionBackend",
    "RankInfo",
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
