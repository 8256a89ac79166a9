"""Requests that may not sample every token: when they run, what they may sample, and when they end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from minisgl.batch import Batch
from minisgl.request import Int32Array, MaskMaker, TokenConstraint
from minisgl.table import RunningTable


class Constraints:
    """The constraints of the running requests, all handled on the host.

    The host must see a token to know what may follow. So where steps overlap, a constrained row sits out the step that
    is launched while its last token is being sampled.
    """

    def __init__(self, table: RunningTable, make_masks: MaskMaker | None) -> None:
        self._table = table
        self._make_masks = make_masks
        self._held_back = False
        self._ahead: dict[int, list[TokenConstraint]] = {}  # by slot: states behind each draft of the next step

    def ready(self, slots: Int32Array) -> Int32Array:
        """Select the ``slots`` whose masks can be made now; all of them could decode otherwise."""
        table = self._table
        constrained = table.constrained[slots]
        unseen = constrained & (table.known_len[slots] < table.token_len[slots])
        # Constrained rows that run in alternate steps would read the model's weights twice as often. So ready rows wait
        # for the others, but for one step only: a stream of new requests must not hold them up.
        hold_back = bool(unseen.any()) and bool((constrained & ~unseen).any()) and not self._held_back
        self._held_back = hold_back
        return slots[~(constrained if hold_back else unseen)]

    def clip(self, slot: int, drafts: Int32Array) -> Int32Array:
        """Cut drafts before the first one that the row's constraint forbids, or behind which nothing may follow."""
        if not self._table.constrained[slot]:
            return drafts
        (state,) = self._constraints_of(np.array([slot]))
        ahead = self._ahead[slot] = []
        for token in drafts.tolist():
            state = state.fork()
            state.accept(token)
            if state.error or state.finished:
                break
            ahead.append(state)
        return drafts[: len(ahead)]

    def add_masks(self, batch: Batch) -> Batch:
        """Return the step with a mask for each constrained row that samples, behind each of its drafts too."""
        sampled = batch.slots[batch.sample_rows]
        rows = np.flatnonzero(self._table.constrained[sampled]).astype(np.int32)
        if len(rows) == 0:
            return batch
        assert self._make_masks is not None, "requests with constraints need a scheduler with `make_masks`"
        masks = self._make_masks(self._states(sampled[rows]))
        self._ahead.clear()
        return replace(batch, mask_rows=rows, masks=masks.reshape(-1))

    def accept(self, slots: Int32Array, tokens: Int32Array) -> dict[int, str | None]:
        """Pass new tokens, int32[n], to the constraints of their ``slots``, int32[n], each exactly once.

        Returns the requests that end with these tokens, by index: None for a complete output, else the error.
        """
        rows = np.flatnonzero(self._table.constrained[slots])
        ends: dict[int, str | None] = {}
        for row, token, constraint in zip(
            rows.tolist(), tokens[rows].tolist(), self._constraints_of(slots[rows]), strict=True
        ):
            constraint.accept(token)
            if constraint.error or constraint.finished:
                ends[row] = constraint.error
        return ends

    def _states(self, slots: Int32Array) -> list[TokenConstraint]:
        """The constraint of each slot; where a slot is repeated, its states behind one draft, two drafts, and so on."""
        states: list[TokenConstraint] = []
        before, depth = [-1, *slots[:-1].tolist()], 0
        for slot, constraint, last in zip(slots.tolist(), self._constraints_of(slots), before, strict=True):
            depth = depth + 1 if slot == last else 0
            states.append(self._ahead[slot][depth - 1] if depth else constraint)
        return states

    def _constraints_of(self, slots: Int32Array) -> Sequence[TokenConstraint]:
        found = (self._table.request(slot).constraint for slot in slots.tolist())
        return [constraint for constraint in found if constraint is not None]
