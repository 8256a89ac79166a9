"""Chapters 8 and 9: continuous batching, and what happens when memory runs out."""

from minisgl.scheduler.loop import EngineLoop
from minisgl.scheduler.memory import KVMemory
from minisgl.scheduler.policy import ADMISSION_POLICIES, BATCH_POLICIES, QUEUE_POLICIES, Policies
from minisgl.scheduler.queue import WaitingQueue
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.step import StepOutput, TokenEvent

__all__ = [
    "ADMISSION_POLICIES",
    "BATCH_POLICIES",
    "QUEUE_POLICIES",
    "EngineLoop",
    "KVMemory",
    "Policies",
    "Scheduler",
    "StepOutput",
    "TokenEvent",
    "WaitingQueue",
]
