"""Chapter 15: an OpenAI-compatible server over the engine."""

from minisgl.server.app import create_app
from minisgl.server.async_engine import AsyncEngine
from minisgl.server.in_process import InProcessEngine
from minisgl.server.process_engine import ProcessEngine

__all__ = ["AsyncEngine", "InProcessEngine", "ProcessEngine", "create_app"]
