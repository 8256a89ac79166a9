"""What the engine refuses before it loads anything."""

from __future__ import annotations

import pytest

from minisgl import ConfigError
from minisgl.core import EngineConfig
from minisgl.engine.engine import longest_sequence


def test_the_longest_sequence_is_what_was_asked_for_or_what_the_model_has() -> None:
    assert longest_sequence(EngineConfig(max_seq_len=4096), 40960) == 4096
    assert longest_sequence(EngineConfig(), 40960) == 40960


def test_tables_that_an_int32_cannot_index_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_seq_len: 100000 tokens for 65536"):
        longest_sequence(EngineConfig(max_running_requests=65536, max_seq_len=100_000), 131_072)
