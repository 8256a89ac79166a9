"""Every command of this package that a text shows has options that the command takes."""

from __future__ import annotations

import argparse
import re
import shlex
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from minisgl.__main__ import COMMANDS
from tools.links import FENCE

ROOT = Path(__file__).parents[1]
TEXTS = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "chapters/*.md", "assignments/**/*.md", "benchmarks/**/*.md")
    for path in ROOT.glob(pattern)
)
CODE_SPAN = re.compile(r"`([^`]+)`")
COMMAND = re.compile(r"python -m minisgl(?:\.(?P<module>\w+))?(?P<rest>[^\n]*)")
END = re.compile(r"\s(?:#|\||&|;|>|2>).*")


class Understood(Exception):
    """Raised instead of running a command whose arguments were parsed."""


def commands(text: str) -> list[list[str]]:
    """The commands in shell blocks and code spans, each as the arguments of ``python -m minisgl``."""
    fences = [found for found in FENCE.finditer(text) if found["language"] in ("bash", "sh")]
    blocks = [found["code"].replace("\\\n", " ") for found in fences]
    spans = [span.replace("\n", " ") for span in CODE_SPAN.findall(FENCE.sub("", text))]
    found = []
    for each in (match for piece in (*blocks, *spans) for match in COMMAND.finditer(piece)):
        words = shlex.split(END.sub("", each["rest"]).replace(";", " ; "))
        words = words[: words.index(";")] if ";" in words else words
        if "…" not in each["rest"]:
            found.append([*filter(None, [each["module"]]), *words])
    return found


def test_commands_are_found_wherever_they_stand() -> None:
    block = "~~~bash\nA=1 .venv/bin/python -m minisgl.serve --tp 2 \\\n  --port 1 &\n~~~\n"
    text = f"Say `python -m minisgl\ncourse list`.\n\n{block}"
    assert commands(text) == [["serve", "--tp", "2", "--port", "1"], ["course", "list"]]
    assert sum(len(commands((ROOT / path).read_text(encoding="utf-8"))) for path in TEXTS) > 60


@pytest.mark.parametrize("path", TEXTS)
def test_a_command_in_a_text_is_understood(
    path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser: argparse.ArgumentParser, *arguments: Any) -> None:
        parse(parser, *arguments)
        raise Understood

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
    for name, *arguments in filter(None, commands((ROOT / path).read_text(encoding="utf-8"))):
        assert name in COMMANDS, f"{path}: there is no python -m minisgl {name}"
        if not arguments and name in ("bench", "course"):
            continue  # the name of the command, without any to run
        try:
            import_module(COMMANDS[name][0]).main(arguments)
        except Understood:
            continue
        except SystemExit as refused:
            if refused.code == 0:  # --help
                continue
            pytest.fail(f"{path}: python -m minisgl {name} {shlex.join(arguments)}: {capsys.readouterr().err[-300:]}")
