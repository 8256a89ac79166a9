"""Chapter 13: one model on several devices, one process a device."""

from minisgl.distributed.communicator import COMMUNICATORS, TorchCommunicator
from minisgl.distributed.control_plane import CONTROL_PLANES, ControlPlane, StepReceiver
from minisgl.distributed.remote_engine import RemoteEngine
from minisgl.distributed.ring import RingCommunicator

__all__ = [
    "COMMUNICATORS",
    "CONTROL_PLANES",
    "ControlPlane",
    "RemoteEngine",
    "RingCommunicator",
    "StepReceiver",
    "TorchCommunicator",
]
