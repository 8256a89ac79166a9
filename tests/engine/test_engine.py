"""What the engine refuses before it loads anything."""

from __future__ import annotations

import pytest

from minisgl import ConfigError
from minisgl.core import EngineConfig
from minisgl.engine.engine import longest_row


def test_tables_that_an_int32_cannot_index_are_refused() -> None:
    assert longest_row(EngineConfig(max_running_requests=255, max_seq_len=4096)) == 2**23 - 1
    with pytest.raises(ConfigError, match="max_seq_len: 100000 tokens for 65536"):
        longest_row(EngineConfig(max_running_requests=65536, max_seq_len=100_000))
