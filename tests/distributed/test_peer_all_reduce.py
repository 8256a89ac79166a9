"""The all-reduce over peer memory between processes: its kernels in Triton's interpreter, its memory in shared files.

What this proves: the sums, who writes what where, that the counting of calls, turns and signals lets no rank run away
with what another still reads, and that a missing peer is given up. The processes really run at the same time and meet
in nothing but the shared memory. What it cannot prove is what a GPU adds: several programs of a kernel at once, and
memory that orders accesses less strictly. That is ``test_peer_gpu.py``.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.distributed.peer_all_reduce import PeerLayout
from tests.distributed.peer_ranks import CHECKS
from tests.distributed.peer_runs import Outcomes, assert_passed, run_ranks


@pytest.fixture(scope="module", params=[2, 3], ids=["2-ranks", "3-ranks"])
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_ranks(request.param, "cpu", tmp_path_factory.mktemp("ranks"), seconds=240)


@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_between_processes(outcomes: Outcomes, check: str) -> None:
    assert_passed(outcomes, check)


layouts = st.builds(
    PeerLayout, ranks=st.integers(2, 8), one_shot_bytes=st.integers(4, 1 << 20), max_bytes=st.integers(4, 1 << 24)
)


@given(layouts)
def test_parts_follow_one_another_on_boundaries_of_16_bytes(layout: PeerLayout) -> None:
    words_of_all_ranks_in_both_turns = 2 * layout.ranks * layout.capacity
    assert layout.capacity * 4 >= layout.one_shot_bytes
    assert words_of_all_ranks_in_both_turns * 8 <= layout.inbox < layout.outbox < layout.pads < layout.nbytes
    assert all(part % 16 == 0 for part in (layout.inbox, layout.outbox, layout.pads, layout.capacity * 8))


@given(layouts, st.integers(1, 1 << 20), st.integers(1, 20_000))
def test_what_fits_stays_within_its_part(layout: PeerLayout, rows: int, row_words: int) -> None:
    """Groups of one row a rank, the last of which may lack all but one."""
    if layout.fits_rows(rows, row_words * 4) and not layout.fits_one_shot(rows * row_words * 4):
        groups = -(-rows // layout.ranks)
        assert groups * layout.ranks * row_words * 4 <= layout.outbox - layout.inbox == layout.pads - layout.outbox
        assert groups <= layout.groups


@given(layouts, st.integers(1, 1 << 24), st.sampled_from([2048 * 2, 4096 * 2, 4096 * 4]))
def test_what_fits_as_a_whole_fits_in_rows_without_meaning(layout: PeerLayout, nbytes: int, row_bytes: int) -> None:
    if layout.fits(nbytes):
        groups = -(-nbytes // (row_bytes * layout.ranks))
        assert groups * layout.ranks * row_bytes <= layout.outbox - layout.inbox
        assert groups <= layout.groups


@pytest.mark.parametrize(
    ("nbytes", "fits"), [(0, False), (2, False), (4, True), (6, False), (1 << 20, True), ((1 << 20) + 4, False)]
)
def test_whole_words_up_to_the_limit_fit(nbytes: int, fits: bool) -> None:
    assert PeerLayout(4, 1 << 10, 1 << 20).fits(nbytes) == fits


def test_a_row_too_long_for_a_program_does_not_fit() -> None:
    layout = PeerLayout(2, 1 << 10, 1 << 24)
    assert layout.fits_rows(64, 32 << 10)
    assert not layout.fits_rows(64, (32 << 10) + 4)


def test_so_many_short_rows_that_they_lack_signal_pads_do_not_fit() -> None:
    layout = PeerLayout(2, 1 << 10, 1 << 20)
    assert layout.fits_rows((1 << 20) // 256, 256)
    assert not layout.fits_rows((1 << 20) // 128, 128)
    assert layout.fits_rows(8, 128), "one shot needs no pads"
