"""``--trace FILE``: the engine's last steps, in a file, when the server has stopped."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minisgl import LLM, SamplingParams
from minisgl.errors import ConfigError
from minisgl.server import recording
from minisgl.trace import Trace


def test_the_last_steps_are_written_when_it_is_over(
    reference: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "MAX_EVENTS", 40)
    file = tmp_path / "trace.json"

    def serve() -> None:
        with recording.recording(reference.core, str(file)):
            reference.generate([5, 6, 7], SamplingParams(max_tokens=60, ignore_eos=True))
            raise SystemExit(0)  # the way in which signals end a server

    with pytest.raises(SystemExit):
        serve()
    events = json.loads(file.read_text())["traceEvents"]
    assert len([event for event in events if event["ph"] != "M"]) == 40
    steps = [event.args["step"] for event in Trace.load(file).events if "step" in event.args]
    assert (min(steps) > 30, max(steps)) == (True, 59)


def test_a_file_that_cannot_be_written_is_found_out_at_once(reference: LLM, tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"^trace: cannot write"),
        recording.recording(reference.core, str(tmp_path / "nowhere" / "trace.json")),
    ):
        pass
