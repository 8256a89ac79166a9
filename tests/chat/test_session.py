from __future__ import annotations

import io
from collections.abc import Generator, Sequence

import pytest

from minisgl.chat.partner import Messages, NoAnswer
from minisgl.chat.session import Session, printable


class Parrot:
    """Answers every message by counting it, and does what else a test asks for.

    Args:
        trouble: raised in the middle of the answer to the message of that text.
    """

    name = "a parrot"

    def __init__(self, trouble: BaseException | None = None, reason: str = "stop") -> None:
        self.trouble = trouble
        self.reason = reason
        self.heard: list[Messages] = []
        self.closed = 0

    def answer(self, messages: Messages) -> Generator[str, None, str]:
        self.heard.append(messages)
        try:
            yield "answer "
            if messages[-1]["content"] == "trouble" and self.trouble is not None:
                raise self.trouble
            yield str(len(self.heard))
            return self.reason
        finally:
            self.closed += 1


def run(partner: Parrot, lines: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    Session(partner).run()


def said(messages: Messages) -> list[str]:
    return [message["content"] for message in messages]


def test_the_whole_conversation_is_sent_until_it_is_reset(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parrot = Parrot()
    run(parrot, ["one", "", "two", "/reset", "three"], monkeypatch)
    assert [said(messages) for messages in parrot.heard] == [["one"], ["one", "answer 1", "two"], ["three"]]
    assert [message["role"] for message in parrot.heard[1]] == ["user", "assistant", "user"]
    assert capsys.readouterr().out.splitlines() == ["answer 1", "answer 2", "(a new conversation)", "answer 3"]


def test_the_system_prompt_comes_first_and_outlives_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    parrot = Parrot()
    run(parrot, ["one", "/system Be brief. ", "two", "/reset", "three", "/system", "four"], monkeypatch)
    assert [said(messages) for messages in parrot.heard] == [
        ["one"],
        ["Be brief.", "one", "answer 1", "two"],
        ["Be brief.", "three"],
        ["three", "answer 3", "four"],
    ]
    assert parrot.heard[1][0]["role"] == "system"


@pytest.mark.parametrize("command", ["/help", "/resett", "/reset now", "/"])
def test_an_unknown_command_shows_those_there_are(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parrot = Parrot()
    run(parrot, [command], monkeypatch)
    assert parrot.heard == []
    assert "/system TEXT" in capsys.readouterr().out


def test_exit_ends_the_session_before_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    parrot = Parrot()
    run(parrot, ["/exit", "one"], monkeypatch)
    assert parrot.heard == []


def test_an_error_is_shown_and_forgotten(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    parrot = Parrot(NoAnswer("the context is full\x1b[2J"))
    run(parrot, ["one", "trouble", "two"], monkeypatch)
    assert said(parrot.heard[2]) == ["one", "answer 1", "two"]
    assert "error: the context is full�[2J" in capsys.readouterr().out


def test_an_interrupt_ends_the_answer_and_what_there_is_of_it_is_remembered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parrot = Parrot(KeyboardInterrupt())
    run(parrot, ["trouble", "two"], monkeypatch)
    assert said(parrot.heard[1]) == ["trouble", "answer ", "two"]
    assert "(stopped)" in capsys.readouterr().out
    assert parrot.closed == 2


def test_an_interrupt_at_the_prompt_is_no_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter([KeyboardInterrupt(), "one", EOFError()])

    def next_line(prompt: str) -> str:
        line = next(lines)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("minisgl.chat.session._read", next_line)
    parrot = Parrot()
    Session(parrot).run()
    assert said(parrot.heard[0]) == ["one"]
    assert "/exit" in capsys.readouterr().out


def test_a_full_context_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(Parrot(reason="length"), ["one"], monkeypatch)
    assert "the context is full; /reset" in capsys.readouterr().out


def test_an_answer_cannot_command_the_terminal() -> None:
    assert printable("naïve 日本 🙂\n\tok") == "naïve 日本 🙂\n\tok"
    assert printable("a\x1b]0;title\x07b\r\x9bc\u202e") == "a�]0;title�b��c�"
