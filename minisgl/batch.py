"""One step of work: as the scheduler describes it (NumPy), as the model reads it (tensors), and the copy between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import torch

from minisgl.request import Int32Array, Request, TokenLogprobs
from minisgl.sampling_params import SamplingParams

_NOTHING: Int32Array = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class NewRequest:
    """What the engine must know of a request that gets a slot with this step.

    Args:
        slot: the request's row from now on.
        tokens: all its tokens so far, int32[len]: the prompt, and after a preemption the output too.
        prompt_len: how many of them are the prompt.
        params: sampling parameters.
        stop_ids: tokens that may not be sampled before ``params.min_tokens``.
        seed: sampling seed.
    """

    slot: int
    tokens: Int32Array
    prompt_len: int
    params: SamplingParams
    stop_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True, slots=True)
class Batch:
    """A step: which tokens of which slots are fed to the model, where their KV goes, and who samples.

    This is all that an engine is told, so it is also the message that tensor-parallel ranks receive. Prefill, decode
    and mixed steps are the same flat arrays; a decode row is a row with one token. Decode rows come first, then
    prefill rows, each in order of arrival. R rows, T tokens, S sampling rows; everything is int32.

    Args:
        slots: [R] row of each request in the token and page tables.
        cu_seqlens_q: [R + 1] row r feeds the flat tokens ``cu_seqlens_q[r] … cu_seqlens_q[r + 1]``.
        seq_lens: [R] tokens in the KV cache once this step has run, the fed ones included (k length of the row).
        positions: [T] position of each fed token in its sequence.
        token_slots: [T] slot of each fed token.
        out_locs: [T] where the fed token's K and V are written: page id × page_size + offset.
        sample_rows: [S] rows whose last token's logits are sampled; a prefill chunk that is not the last does not.
        output_index: [S] how many tokens the row has generated before this one.
        num_decode: leading rows that are decode rows.
        new_requests: requests that get their slot with this step.
        page_index, page_value: [U] entries of the flattened page table that change before this step, and their values.
        mask_rows: [C] indices into the S sampling rows: those that may not sample every token.
        masks: [C × words] for each of them one bit a token, see `MaskMaker`.
    """

    slots: Int32Array
    cu_seqlens_q: Int32Array
    seq_lens: Int32Array
    positions: Int32Array
    token_slots: Int32Array
    out_locs: Int32Array
    sample_rows: Int32Array
    output_index: Int32Array
    num_decode: int
    new_requests: tuple[NewRequest, ...] = ()
    page_index: Int32Array = field(default_factory=lambda: _NOTHING)
    page_value: Int32Array = field(default_factory=lambda: _NOTHING)
    mask_rows: Int32Array = field(default_factory=lambda: _NOTHING)
    masks: Int32Array = field(default_factory=lambda: _NOTHING)

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
    page_index: Int32Array = _NOTHING,
    page_value: Int32Array = _NOTHING,
) -> Batch:
    """Lay out a step as flat arrays.

    Args:
        slots: [R] int32 rows to run, decode rows first.
        q_lens: [R] int32 tokens to feed for each.
        kv_lens: [R] int32 tokens that each has in the KV cache already.
        page_table: [slots, pages] int32 page ids; must cover ``kv_lens + q_lens`` tokens of each row.
        page_size: tokens a page.
        sample_rows, output_index, num_decode, new_requests, page_index, page_value: as in `Batch`.
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
    )


@dataclass(slots=True)
class DeviceBatch:
    """The part of a `Batch` that the model and the attention backend read, as int32 tensors on the device.

    Args:
        input_ids, positions, out_locs: [T].
        slots, seq_lens: [R].
        cu_seqlens_q: [R + 1].
        page_table: [max_running + 1, pages] the whole table; row ``slots[r]`` belongs to row r.
        logit_rows: [S] flat index of the token whose hidden state is turned into logits.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    out_locs: torch.Tensor
    slots: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    page_table: torch.Tensor
    logit_rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced, on the host.

    Args:
        tokens: [S] int32 sampled token of each sampling row.
        logprobs: [S] entries, None for rows that did not ask; or None if no row asked.
    """

    tokens: Int32Array
    logprobs: list[TokenLogprobs | None] | None = None


class PendingStep(Protocol):
    """A launched step."""

    def wait(self) -> StepResult:
        """Block until the step's tokens are on the host. Errors of the step are raised here or by ``launch``."""
        ...


class StepLauncher(Protocol):
    """Runs steps in the order in which they are launched. An engine is one; a null model for benchmarks is another."""

    def launch(self, batch: Batch) -> PendingStep:
        """Start a step and return at once where the device allows it."""
        ...


StepPhase = Literal["schedule", "launch", "compute", "wait", "process", "fail"]
"""What is done for a step, in this order; ``fail`` replaces what comes after an error.

``compute`` lies within ``launch``: the engine sends the step's kernels to the device. All others are the loop's.
"""


class StepObserver(Protocol):
    """Follows the steps of a loop, and of an engine in the same process. It must not raise."""

    def begin(self, phase: StepPhase, batch: Batch | None) -> None:
        """A phase of the step ``batch`` begins. To ``schedule`` has no batch yet."""
        ...

    def end(self, phase: StepPhase, batch: Batch | None) -> None:
        """The phase is over, possibly with an error. A ``schedule`` that found nothing to run ends without a batch.

        A ``compute`` that raised does not end.
        """
        ...

    def finish(self, requests: Sequence[Request]) -> None:
        """These requests have ended. Each is reported once."""
        ...


_ALIGNMENT = 4  # int32 words, 16 bytes


def to_device(arrays: Mapping[str, Int32Array], device: torch.device) -> dict[str, torch.Tensor]:
    """Copy one-dimensional int32 arrays to the device in one transfer, and give them back under their names.

    A copy from host to device costs about the same for 40 bytes as for 40 KB, so what a step needs is packed first.
    On CUDA the buffer is pinned and the copy asynchronous; PyTorch's allocator keeps a pinned buffer until the copies
    that read it are done. Every array begins on a 16-byte boundary, for which kernels are compiled; Triton would
    compile them again for each combination of arguments that happen to be aligned.
    """
    starts = np.cumsum([0, *(-(-len(array) // _ALIGNMENT) * _ALIGNMENT for array in arrays.values())]).tolist()
    buffer = torch.empty(starts[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    host = buffer.numpy()
    for start, array in zip(starts, arrays.values(), strict=False):
        host[start : start + len(array)] = array
    copy = buffer.to(device, non_blocking=True)
    return {
        name: copy[start : start + len(array)] for start, (name, array) in zip(starts, arrays.items(), strict=False)
    }


def batch_arrays(batch: Batch) -> dict[str, Int32Array]:
    """What the device needs of a batch, by name, for `to_device`."""
    return {
        "slots": batch.slots,
        "cu_seqlens_q": batch.cu_seqlens_q,
        "seq_lens": batch.seq_lens,
        "positions": batch.positions,
        "token_slots": batch.token_slots,
        "out_locs": batch.out_locs,
        "sample_slots": batch.slots[batch.sample_rows],
        "sample_positions": batch.seq_lens[batch.sample_rows],
        "logit_rows": batch.cu_seqlens_q[1:][batch.sample_rows] - 1,
    }


def device_batch(staged: dict[str, torch.Tensor], input_ids: torch.Tensor, page_table: torch.Tensor) -> DeviceBatch:
    """Name the staged tensors as the model knows them.

    Args:
        staged: `batch_arrays` on the device.
        input_ids: [T] int32 tokens to feed.
        page_table: [rows, pages] int32.
    """
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
