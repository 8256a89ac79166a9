"""The tokenizer's and the detokenizer's stage: what they answer, refuse, and forget."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl.errors import Failure
from minisgl.request import TokenLogprobs
from minisgl.sampling_params import SamplingParams
from minisgl.server.detokenizer_worker import DetokenizerStage
from minisgl.server.messages import (
    Accepted,
    Conversation,
    Finished,
    Progress,
    Rejected,
    Reply,
    RequestAccepted,
    Started,
    StatsReply,
    Token,
    Tokenized,
    Update,
    submit,
)
from minisgl.server.tokenizer_worker import TokenizerStage
from minisgl.tokenizer import Tokenizer
from tests.tiny_tokenizer import byte_level, save, tiny_tokenizer

USER = {"role": "user", "content": "the dog"}


def tokenize(*prompts: Any, tokenizer: Tokenizer | None = None, limit: int | None = None) -> Tokenized | Rejected:
    stage = TokenizerStage(tokenizer or tiny_tokenizer("byte-level"), limit)
    stage.take(submit(5, prompts, SamplingParams(stop="x"), True, "me"))
    outcome = stage.step()
    assert outcome is not None
    return outcome[1]


def test_a_job_of_many_texts_does_not_stand_before_others() -> None:
    stage = TokenizerStage(tiny_tokenizer("byte-level"), None)
    for job, prompts in ((1, ["the dog"] * 1000), (2, ["the fox"]), (3, ["a"] * 1000)):
        stage.take(submit(job, prompts, SamplingParams(), False, ""))
    done: dict[int, int] = {}
    while stage.has_work:
        if (outcome := stage.step()) is not None:
            assert isinstance(outcome[1], Tokenized)
            done[outcome[0].job] = len(outcome[1].prompts)
    assert list(done.items()) == [(2, 1), (1, 1000), (3, 1000)]


def test_a_client_of_many_jobs_does_not_stand_before_others() -> None:
    stage = TokenizerStage(tiny_tokenizer("byte-level"), None)
    for job in range(101):
        stage.take(submit(job, ["the dog"], SamplingParams(), False, "", client="b" if job == 100 else "a"))
    done: list[int] = []
    while stage.has_work:
        outcome = stage.step()
        assert outcome is not None
        assert isinstance(outcome[1], Tokenized)
        assert outcome[1].client == outcome[0].client
        done.append(outcome[0].job)
    assert done == [0, 100, *range(1, 100)]


def test_all_kinds_of_prompts_become_token_ids() -> None:
    tokenizer = tiny_tokenizer("byte-level")
    message = tokenize("the dog", [5, 6], Conversation([USER]))
    assert isinstance(message, Tokenized)
    ids = [np.frombuffer(prompt, np.int32).tolist() for prompt in message.prompts]
    assert ids == [tokenizer.encode("the dog"), [5, 6], tokenizer.encode_chat([USER])]
    assert (message.job, message.params, message.streaming, message.user) == (5, {"stop": ("x",)}, True, "me")


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ("half a \ud800", "prompt"),
        (Conversation([]), "messages"),
        (Conversation([USER, {"role": "robot", "content": "x"}]), "messages[1].role"),
        (Conversation([{"role": "tool", "content": "the template refuses this"}]), "messages"),
    ],
)
def test_a_bad_prompt_ends_its_job_alone(prompt: Any, field: str) -> None:
    message = tokenize("the dog", prompt)
    assert isinstance(message, Rejected)
    assert (message.job, message.failure.kind, message.failure.field) == (5, "InvalidRequest", field)


@pytest.mark.parametrize("template", ["{% if %}", "{{ 1 / 0 }}", "{{ messages[99].content }}"])
def test_a_bad_template_ends_its_job_alone(tmp_path: Path, template: str) -> None:
    tokenizer = Tokenizer(save(byte_level(), tmp_path, template))
    message = tokenize(Conversation([USER]), tokenizer=tokenizer)
    assert isinstance(message, Rejected)
    assert message.failure.field == "messages"
    assert isinstance(tokenize("the dog", tokenizer=tokenizer), Tokenized)


def test_what_is_far_too_long_is_refused_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer("byte-level")
    encoded: list[str] = []
    monkeypatch.setattr(tokenizer._backend, "encode", lambda text, **options: encoded.append(text) or [1])
    for prompt in ("x" * 10_000, Conversation([{"role": "user", "content": "x" * 10_000}])):
        message = tokenize(prompt, limit=100)
        assert isinstance(message, Rejected)
        assert "10" in message.failure.message
        assert "100 fit the context" in message.failure.message
    assert not encoded
    assert isinstance(tokenize("x" * 500, limit=100), Tokenized), "only what cannot fit is refused"
    assert len(encoded) == 1


TOKENIZER = tiny_tokenizer("byte-level")


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)[1:]


def begin(
    stage: DetokenizerStage, streaming: bool = True, stop: Iterable[str] = (), uids: Iterable[int] = (7,)
) -> None:
    begun = RequestAccepted(1, list(uids), [3], streaming, list(stop), 0)
    started = [Started(uid, 2, 0.5) for uid in uids]
    assert stage.handle(Progress(accepted=[begun], started=started)) == ([Accepted(1, [3])], [])


def feed(stage: DetokenizerStage, *tokens: int, uid: int = 7) -> tuple[list[Update], list[int]]:
    updates: list[Update] = []
    stopped: list[int] = []
    for token_id in tokens:
        replies, ended = stage.handle(Progress(tokens=[Token(uid, token_id)]))
        updates += [reply for reply in replies if isinstance(reply, Update)]
        stopped += ended
    return updates, stopped


def finish(stage: DetokenizerStage, *finished: Finished) -> list[Reply]:
    return stage.handle(Progress(finished=list(finished)))[0]


def states(stage: DetokenizerStage) -> int:
    (told,) = stage.handle(Progress(stats=[StatsReply(0, b"", {})]))[0]
    assert isinstance(told, StatsReply)
    return told.states["detokenizer"]


def test_a_stream_is_told_step_by_step() -> None:
    stage = DetokenizerStage(TOKENIZER)
    begin(stage)
    tokens = ids("the 🦊!")
    updates, stopped = feed(stage, *tokens)
    assert [update.token_ids for update in updates] == [[token] for token in tokens]
    assert "".join(update.text for update in updates) == "the 🦊!"
    assert not any("\ufffd" in update.text for update in updates)
    assert not stopped
    (last,) = finish(stage, Finished(7, "length"))
    assert last == Update(1, 0, finish_reason="length", cached_tokens=2, queue_time=0.5)
    assert states(stage) == 0


def test_the_last_token_and_the_end_make_one_update() -> None:
    stage = DetokenizerStage(TOKENIZER)
    begin(stage)
    half = ids("🦊")[:1]
    progress = Progress(tokens=[Token(7, half[0])], finished=[Finished(7, "error", "no luck")])
    assert stage.handle(progress) == ([Update(1, 0, "\ufffd", half, [], "error", "no luck", 2, 0.5)], [])


def test_who_does_not_stream_hears_once() -> None:
    stage = DetokenizerStage(TOKENIZER)
    begin(stage, streaming=False, uids=[7, 8])
    tokens, entry = ids("the cat"), TokenLogprobs(5, -1.0)
    (update,) = finish(stage, Finished(8, "stop", None, tokens, [entry]))
    assert update == Update(1, 1, "the cat", tokens, [entry], "stop", None, 2, 0.5)
    assert states(stage) == 1


@pytest.mark.parametrize("streaming", [True, False])
def test_a_stop_string_ends_the_text_and_is_told_to_the_scheduler(streaming: bool) -> None:
    stage = DetokenizerStage(TOKENIZER)
    begin(stage, streaming, stop=["cat", "and t"])
    tokens = ids("the dog and the cat")
    updates, stopped = feed(stage, *tokens)
    assert stopped == [7], "once, whatever is computed after it"
    assert "".join(update.text for update in updates) == "the dog "
    assert (updates[-1].finish_reason, updates[-1].cached_tokens) == ("stop", 2)
    told = [token for update in updates for token in update.token_ids]
    assert TOKENIZER.decode(told).startswith("the dog and t")
    assert told == tokens[: len(told)] != tokens
    assert states(stage) == 0
    assert finish(stage, Finished(7, "stop")) == [], "the scheduler's own word comes too late to matter"


def test_what_the_same_step_brings_after_a_stop_string_is_dropped() -> None:
    stage = DetokenizerStage(TOKENIZER)
    begin(stage, stop=["the"])
    tokens = [Token(7, token_id) for token_id in ids("the the dog")]
    (update,), stopped = stage.handle(Progress(tokens=tokens, finished=[Finished(7, "length")]))
    assert isinstance(update, Update)
    assert (update.text, update.finish_reason, stopped) == ("", "stop", [7])
    assert TOKENIZER.decode(update.token_ids) == "the"


def test_a_token_brings_its_logprobs_and_the_drafts_so_far() -> None:
    stage = DetokenizerStage(TOKENIZER)
    begin(stage, stop=["the"], uids=[7, 8])
    dog, the, entry = ids("dog")[0], ids("the"), TokenLogprobs(5, -1.0)
    replies, _ = stage.handle(Progress(tokens=[Token(7, dog, entry, (3, 1)), Token(8, dog)]))
    assert [(each.logprobs, each.drafts) for each in replies if isinstance(each, Update)] == [
        ([entry], (3, 1)),
        ([], (0, 0)),
    ]
    dropped = Token(7, dog, entry, (9, 9))
    replies, _ = stage.handle(Progress(tokens=[*(Token(7, token_id, None, (4, 1)) for token_id in the), dropped]))
    (update,) = replies
    assert isinstance(update, Update)
    assert (update.finish_reason, update.drafts) == ("stop", (4, 1)), (
        "what comes behind the stop string is dropped whole"
    )


def test_updates_are_in_the_order_of_their_uids_for_those_who_stream() -> None:
    stage = DetokenizerStage(TOKENIZER)
    begin(stage, uids=[30, 7])
    begin(stage, streaming=False, uids=[9])
    begin(stage, uids=[8])
    dog = ids("dog")[0]
    replies, _ = stage.handle(Progress(tokens=[Token(uid, dog) for uid in (30, 9, 8, 7)]))
    updates = [reply for reply in replies if isinstance(reply, Update)]
    assert [update.choice for update in updates] == [1, 0, 0], "those of 7, 8 and 30"
    assert [update.token_ids for update in updates] == [[dog]] * 3
    assert states(stage) == 4, "nobody has ended, and the one that doesn't stream waits"


def test_a_stop_string_that_did_not_come_is_released() -> None:
    stage = DetokenizerStage(TOKENIZER)
    begin(stage, stop=["dog and more"])
    updates, _ = feed(stage, *ids("the dog and"))
    assert "".join(update.text for update in updates) == "the "
    (last,) = finish(stage, Finished(7, "length"))
    assert isinstance(last, Update)
    assert (last.text, last.finish_reason) == ("dog and", "length")


def test_bad_news_passes_through() -> None:
    rejected = Rejected(9, Failure("QueueFull", "full"))
    assert DetokenizerStage(TOKENIZER).handle(Progress(rejected=[rejected])) == ([rejected], [])


def test_a_thousand_requests_leave_nothing() -> None:
    stage = DetokenizerStage(TOKENIZER)
    for uid in range(1000):
        begin(stage, streaming=uid % 2 == 0, stop=["cat"] if uid % 3 == 0 else [], uids=[uid])
        feed(stage, *ids("the cat")[: uid % 5], uid=uid)
        finish(stage, Finished(uid, ("stop", "length", "abort", "error")[uid % 4]))
    assert states(stage) == 0
