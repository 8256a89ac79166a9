"""Chapter 15: an OpenAI-compatible server over the engine."""

from minisgl.server.app import create_app
from minisgl.server.async_engine import AsyncEngine

__all__ = ["AsyncEngine", "create_app"]
