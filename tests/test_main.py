"""``python -m minisgl``: it lists its commands, and runs the one that is named."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

from minisgl.__main__ import COMMANDS, main


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_without_a_command_all_are_listed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert list(COMMANDS) == ["serve", "chat", "demo", "bench", "course"]
    for name, (module, help_text) in COMMANDS.items():
        assert f"  {name} " in output
        assert help_text in output
        assert find_spec(module) is not None


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert "usage: " in capsys.readouterr().out


def test_an_unknown_command_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train"]) == 2
    assert "no command 'train'; choose one of serve, chat, demo, bench, course" in capsys.readouterr().err


def test_the_status_of_a_command_is_that_of_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "minisgl", "course", "start", "99", "new"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert "chapter 99 is not in the course" in done.stderr


@pytest.mark.parametrize(("arguments", "loaded"), [([], []), (["chat", "--help"], ["minisgl.chat"])])
def test_a_command_is_imported_when_it_is_chosen(arguments: list[str], loaded: list[str]) -> None:
    code = f"""
import contextlib, io, sys
from minisgl.__main__ import COMMANDS, main
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    main({arguments})
print(*sorted({{"torch", *(module for module, _ in COMMANDS.values())}} & set(sys.modules)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == loaded
