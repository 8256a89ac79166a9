from __future__ import annotations

from tests.server.conftest import checkpoint, own_server, server

__all__ = ["checkpoint", "own_server", "server"]
