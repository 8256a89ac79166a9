"""One step of work: as the scheduler describes it (NumPy), as the model reads it (tensors), and the copy between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import torch

from minisgl.request import Int32Array, Request, TokenLogprobs
from minisgl.sampling_params import SamplingParams

_EMPTY: Int32Array = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Batch:
    """A step: which tokens of which slots are fed to the model, where their KV goes, and which rows sample.

    Flat int32 arrays for prefill, decode and mixed steps: decode rows (one token each) first, then rows that verify
    drafts, then prefill rows, each in order of arrival. R rows, T tokens, S sampling rows. It is also the message that
    tensor-parallel ranks receive.

    A row that verifies k drafts feeds its newest token and the drafts, and samples behind each of them: it is k + 1 of
    the S sampling rows. What is sampled behind a wrong draft means nothing.
    """

    slots: Int32Array  # [R] row of each request in the token and page tables
    cu_seqlens_q: Int32Array  # [R + 1] row r feeds the flat tokens cu_seqlens_q[r] … cu_seqlens_q[r + 1]
    seq_lens: Int32Array  # [R] tokens in the KV cache once this step has run, the fed ones included
    positions: Int32Array  # [T] position of each fed token in its sequence
    token_slots: Int32Array  # [T] slot of each fed token
    out_locs: Int32Array  # [T] where the token's K and V are written: page id × page_size + offset
    sample_rows: Int32Array  # [S] rows whose last token's logits are sampled: all but unfinished prefill chunks
    output_index: Int32Array  # [S] tokens that the row has generated before this one, drafts included
    num_decode: int  # leading rows that are decode rows
    new_requests: tuple[NewRequest, ...] = ()  # requests that get their slot with this step
    # [U] entries of the flattened page table that change before this step, and their new values. Where layers with a
    # window have pages of their own, their table follows behind the other: see `PageTable`
    page_index: Int32Array = field(default_factory=lambda: _EMPTY)
    page_value: Int32Array = field(default_factory=lambda: _EMPTY)
    # [C] sampling rows (indices into S) that may not sample every token, and [C × words] their masks: see `MaskMaker`
    mask_rows: Int32Array = field(default_factory=lambda: _EMPTY)
    masks: Int32Array = field(default_factory=lambda: _EMPTY)
    # [3 × copies] what ranks in other processes copy to and from host memory before this step: see `QueuedCopies`
    page_moves: Int32Array = field(default_factory=lambda: _EMPTY)
    # [D] draft tokens of the rows that verify, in the order of the rows
    drafts: Int32Array = field(default_factory=lambda: _EMPTY)

    @property
    def logit_rows(self) -> Int32Array:
        """[S] flat index of the fed token behind which each sampling row samples."""
        ends = self.cu_seqlens_q[1:][self.sample_rows]
        if len(self.drafts) == 0:
            return ends - 1
        # A row that occurs n times samples behind each of its last n tokens.
        last = np.searchsorted(self.sample_rows, self.sample_rows, side="right")
        return (ends - last + np.arange(len(last))).astype(np.int32)

    @property
    def draft_rows(self) -> Int32Array:
        """[D] sampling rows that are fed a draft: index into S of each of the ``drafts``."""
        return np.flatnonzero(self.sample_rows[1:] == self.sample_rows[:-1]).astype(np.int32) + 1

    @property
    def num_generating(self) -> int:
        """Leading rows that decode, with drafts or without."""
        return self.num_decode + len(np.unique(self.sample_rows[self.draft_rows]))

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return len(self.positions)

    @property
    def q_lens(self) -> Int32Array:
        """[R] tokens fed for each row."""
        return np.diff(self.cu_seqlens_q)

    @property
    def max_q_len(self) -> int:
        return int(self.q_lens.max())

    @property
    def max_seq_len(self) -> int:
        return int(self.seq_lens.max())


@dataclass(frozen=True, slots=True)
class NewRequest:
    """What the engine has to know of a request that gets a slot with this step."""

    slot: int
    tokens: Int32Array  # [len] all tokens so far: the prompt, and after a preemption the output too
    prompt_len: int  # how many of them are the prompt
    params: SamplingParams
    stop_ids: tuple[int, ...]  # tokens that may not be sampled before params.min_tokens
    seed: int


def build_batch(
    slots: Int32Array,
    q_lens: Int32Array,
    kv_lens: Int32Array,
    page_table: Int32Array,
    page_size: int,
    sample_rows: Int32Array,
    output_index: Int32Array,
    num_decode: int,
    new_requests: Sequence[NewRequest] = (),
    page_index: Int32Array = _EMPTY,
    page_value: Int32Array = _EMPTY,
    drafts: Int32Array = _EMPTY,
) -> Batch:
    """Lay out a step as flat arrays. Other arguments are fields of the `Batch`.

    Args:
        slots: [R] int32 rows to run, decode rows first.
        q_lens, kv_lens: [R] int32 tokens of each row to feed, and tokens that are in the KV cache already.
        page_table: [slots, pages] int32 page ids; must cover ``kv_lens + q_lens`` tokens of each row.
    """
    cu_seqlens_q = np.zeros(len(slots) + 1, dtype=np.int32)
    np.cumsum(q_lens, out=cu_seqlens_q[1:])
    token_slots = np.repeat(slots, q_lens)
    offset_in_row = np.arange(cu_seqlens_q[-1], dtype=np.int32) - np.repeat(cu_seqlens_q[:-1], q_lens)
    positions = np.repeat(kv_lens, q_lens) + offset_in_row
    out_locs = page_table[token_slots, positions // page_size] * page_size + positions % page_size
    return Batch(
        slots=slots,
        cu_seqlens_q=cu_seqlens_q,
        seq_lens=kv_lens + q_lens,
        positions=positions,
        token_slots=token_slots,
        out_locs=out_locs,
        sample_rows=sample_rows,
        output_index=output_index,
        num_decode=num_decode,
        new_requests=tuple(new_requests),
        page_index=page_index,
        page_value=page_value,
        drafts=drafts,
    )


@dataclass(slots=True)
class DeviceBatch:
    """The part of a `Batch` that the model and the attention backend read, as int32 tensors on the device."""

    input_ids: torch.Tensor  # [T] tokens to feed
    positions: torch.Tensor  # [T]
    out_locs: torch.Tensor  # [T]
    slots: torch.Tensor  # [R]
    seq_lens: torch.Tensor  # [R]
    cu_seqlens_q: torch.Tensor  # [R + 1]
    page_table: torch.Tensor  # [max_running + 1, pages] the whole table; row slots[r] belongs to row r
    logit_rows: torch.Tensor  # [S] flat index of the token whose hidden state is turned into logits
    # The tensors keep their addresses and are longer than the step: rows past its end have no tokens and no keys, and
    # the last row is always such a row. Tokens past its end belong to no row.
    padded: bool = False
    verifies: bool = False  # padded inputs of steps that verify drafts: all rows may have tokens, but few each
    # As `page_table` and `out_locs`, for layers with a sliding window that have pages of their own; None: they have not
    window_table: torch.Tensor | None = None
    window_locs: torch.Tensor | None = None

    def table_of(self, window: int | None) -> torch.Tensor:
        """The page table that layers with this sliding window read, or with none."""
        return self.page_table if window is None or self.window_table is None else self.window_table

    def locs_of(self, window: int | None) -> torch.Tensor:
        """Where layers with this sliding window, or with none, write the keys and values of the step, int32[T]."""
        return self.out_locs if window is None or self.window_locs is None else self.window_locs


def batch_arrays(batch: Batch) -> dict[str, Int32Array]:
    """The arrays of a batch that the device needs, by name, for `to_device`."""
    logit_rows = batch.logit_rows
    return {
        "slots": batch.slots,
        "cu_seqlens_q": batch.cu_seqlens_q,
        "seq_lens": batch.seq_lens,
        "positions": batch.positions,
        "token_slots": batch.token_slots,
        "out_locs": batch.out_locs,
        "sample_slots": batch.slots[batch.sample_rows],
        "sample_positions": batch.positions[logit_rows] + 1,
        "logit_rows": logit_rows,
    }


ALIGNMENT = 4  # int32 words, 16 bytes


def to_device(arrays: Mapping[str, Int32Array], device: torch.device) -> dict[str, torch.Tensor]:
    """Copy one-dimensional int32 arrays to the device in one transfer, and return them under their names.

    One buffer, since 40 KB take no longer than 40 bytes. On CUDA it is pinned and the copy asynchronous; PyTorch keeps
    it until the copy is done. Arrays start on 16-byte boundaries, because Triton compiles a kernel for each alignment.
    """
    starts = np.cumsum([0, *(-(-len(array) // ALIGNMENT) * ALIGNMENT for array in arrays.values())]).tolist()
    buffer = torch.empty(starts[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    host = buffer.numpy()
    for start, array in zip(starts, arrays.values(), strict=False):
        host[start : start + len(array)] = array
    copy = buffer.to(device, non_blocking=True)
    return {
        name: copy[start : start + len(array)] for start, (name, array) in zip(starts, arrays.items(), strict=False)
    }


def device_batch(staged: Mapping[str, torch.Tensor], input_ids: torch.Tensor, page_table: torch.Tensor) -> DeviceBatch:
    """Make a `DeviceBatch` of `batch_arrays` that `to_device` has copied."""
    return DeviceBatch(
        input_ids=input_ids,
        positions=staged["positions"],
        out_locs=staged["out_locs"],
        slots=staged["slots"],
        seq_lens=staged["seq_lens"],
        cu_seqlens_q=staged["cu_seqlens_q"],
        page_table=page_table,
        logit_rows=staged["logit_rows"],
    )


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced, on the host."""

    tokens: Int32Array  # [S] sampled token of each sampling row
    logprobs: list[TokenLogprobs | None] | None = None  # [S], None for rows that did not ask; None if no row asked


class PendingStep(Protocol):
    """A step that has been launched."""

    def wait(self) -> StepResult:
        """Block until the step's tokens are on the host. Errors of the step are raised here or by ``launch``."""
        ...


class StepLauncher(Protocol):
    """Runs steps in the order of their launch. An engine is one; benchmarks have another that computes nothing."""

    def launch(self, batch: Batch) -> PendingStep:
        """Start a step and return at once where the device allows it."""
        ...


# The phases of a step, in this order; "fail" replaces the rest after an error. "compute" lies within "launch": there
# the engine sends the step's kernels to the device. All others belong to the loop.
StepPhase = Literal["schedule", "launch", "compute", "wait", "process", "fail"]


class StepObserver(Protocol):
    """Follows the steps of a loop, and of an engine in the same process. It must not raise."""

    def begin(self, phase: StepPhase, batch: Batch | None) -> None:
        """A phase of the step ``batch`` begins; ``schedule`` has no batch yet."""
        ...

    def end(self, phase: StepPhase, batch: Batch | None) -> None:
        """A phase is over. A ``schedule`` without work ends without a batch; a ``compute`` that raised does not end."""
        ...

    def finish(self, requests: Sequence[Request]) -> None:
        """These requests have ended. Each is reported once."""
        ...
