"""What can go wrong in a load test, other than the server's answers."""

from __future__ import annotations

from minisgl.errors import MiniSGLError


class LoadError(MiniSGLError, ValueError):
    """The load that was asked for cannot be made. The message names the option or the file, and what to do."""


class ServerFailed(MiniSGLError):
    """The server to be measured does not start, does not answer, or does not end."""
