"""Chapters 8 and 9: continuous batching, and what happens when memory runs out."""

from minisgl.scheduler.loop import EngineLoop
from minisgl.scheduler.memory import KVMemory
from minisgl.scheduler.policy import ADMISSIONS, COMPOSITIONS, ORDERS, Policy
from minisgl.scheduler.queue import WaitingQueue
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.step import StepOutput, TokenEvent

__all__ = [
    "ADMISSIONS",
    "COMPOSITIONS",
    "ORDERS",
    "EngineLoop",
    "KVMemory",
    "Policy",
    "Scheduler",
    "StepOutput",
    "TokenEvent",
    "WaitingQueue",
]
