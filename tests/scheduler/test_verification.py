"""A step with drafts: what is kept of it, and where its rows stand afterwards."""

from __future__ import annotations

import numpy as np
import pytest

from tests.drafting import KnowsTheShadow
from tests.fake_executor import expected_output
from tests.scheduler.harness import DELAYS, Harness


class Right(KnowsTheShadow):
    errors = 0.0


class WrongThird(KnowsTheShadow):
    """Two drafts are right, and the third is not."""

    def _guess(self, tokens: list[int], count: int) -> list[int]:
        drafts = expected_output(tokens, count, self.vocab)
        return [*drafts[:2], *((token + 1) % self.vocab for token in drafts[2:])]


def verifying(made: Harness) -> None:
    """Step until a step with drafts was processed."""
    while not any(len(batch.drafts) for batch in made.batches):
        made.step()


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("drafter", [Right, WrongThird, KnowsTheShadow])
def test_answers_are_those_without_drafts(drafter: type[KnowsTheShadow], delay: int) -> None:
    made = Harness(drafter=drafter, delay=delay)
    requests = [made.add([uid % 3, 1, 2], max_tokens=10 + uid) for uid in range(5)]
    made.run()
    for request in requests:
        made.assert_output(request)
    assert made.speculation is not None
    assert made.speculation.stats.accepted > 0


def test_a_row_is_set_back_to_what_was_verified() -> None:
    made = Harness(drafter=WrongThird)
    made.add([1, 2], max_tokens=20)
    verifying(made)
    table = made.table
    (slot,) = table.slots.tolist()
    assert made.batches[-1].drafts.shape == (3,)
    # The prompt, the first token, two drafts, and the one that the model gave itself, which is not fed yet.
    assert (table.known_len[slot], table.token_len[slot], table.kv_len[slot]) == (6, 6, 5)
    assert table.tokens[slot, 2:6].tolist() == expected_output([1, 2], 4, made.vocab)
    made.step()
    assert made.batches[-1].positions.tolist() == [5, 6, 7, 8]


def test_pages_that_are_filled_in_the_middle_of_drafts_are_published() -> None:
    """Four tokens a step and four a page: no step ends with the last token of a page."""
    made = Harness(drafter=Right, page_size=4)
    request = made.add([1, 2], max_tokens=40)
    lengths = []
    while made.scheduler.has_work:
        made.step()
        slot = request.slot
        if slot >= 0 and (known := int(made.table.known_len[slot])) > 2:
            lengths.append(known)
            assert len(made.memory.cache.match(made.table.tokens[slot, :known]).pages) == (known - 1) // 4
    assert {(known - 1) % 4 for known in lengths[2:-1]} == {2}
    made.assert_output(request)


@pytest.mark.parametrize("place", [1, 2, 3])
def test_a_stop_token_among_the_drafts_ends_the_request(place: int) -> None:
    vocab = 40  # so that the token occurs once
    expected = expected_output([1, 2], 5, vocab)
    assert len(set(expected)) == 5
    made = Harness(drafter=Right, vocab=vocab)
    request = made.add([1, 2], max_tokens=20, stop_ids=(expected[place],))
    made.run()
    assert request.output == expected[: place + 1]
    assert len(made.batches) == 2
    assert request.accepted_drafts == place - 1, "the last token is the one that every step has"


def test_drafts_are_counted() -> None:
    made = Harness(drafter=WrongThird)
    requests = [made.add([uid, 2], max_tokens=20) for uid in range(2)]
    verifying(made)
    stats = made.speculation.stats
    assert (stats.drafted, stats.accepted, stats.verifications) == (6, 4, 2)
    assert [(each.accepted_drafts, each.rejected_drafts) for each in requests] == [(2, 1)] * 2
    made.run()
    generated = sum(len(request.output) for request in requests)
    assert np.sum([len(batch.drafts) for batch in made.batches]) == stats.drafted
    assert generated == 40
