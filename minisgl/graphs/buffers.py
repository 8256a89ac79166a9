"""The memory that a captured decode step reads: fixed addresses, filled by one copy before each replay."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import torch

from minisgl.core.batch import Batch, DeviceBatch
from minisgl.core.request import Int32Array
from minisgl.engine.device_state import DeviceState
from minisgl.engine.sampling_stages import DeviceSampling, HostSampling, RandomStage
from minisgl.engine.staging import to_device
from minisgl.graphs.padding import pad_batch

_FIELDS = 7
"""slots, seq_lens, page_index, page_value, temperature, key_low, key_high: one int32 each a row."""
_NOTHING = np.zeros(0, dtype=np.int32)


class DecodeBuffers:
    """Inputs of decode steps with one number of rows.

    Positions, locations and token ids follow from a row's slot and length, so the host does not send them: they are
    derived on the device, from its own tables.

    Args:
        state: token and page tables; their last row is the dummy slot.
        page_size: tokens a page.
        rows: B.
        fused: whether Triton kernels look up and append tokens: one launch each, where PyTorch takes a dozen.
    """

    def __init__(self, state: DeviceState, page_size: int, rows: int, fused: bool = False) -> None:
        device = state.tokens.device
        self.state = state
        self.page_size = page_size
        self.rows = rows
        self._kernels: ModuleType | None = None
        if fused:
            from minisgl.kernels import decode_inputs

            self._kernels = decode_inputs
        self.dummy_slot = len(state.tokens) - 1
        self._packed = torch.zeros((_FIELDS, rows), dtype=torch.int32, device=device)
        slots, seq_lens, self.page_index, self.page_value, temperature, *keys = self._packed
        self.inputs = DeviceBatch(
            input_ids=torch.zeros(rows, dtype=torch.int32, device=device),
            positions=torch.zeros(rows, dtype=torch.int32, device=device),
            out_locs=torch.zeros(rows, dtype=torch.int32, device=device),
            slots=slots,
            seq_lens=seq_lens,
            cu_seqlens_q=torch.arange(rows + 1, dtype=torch.int32, device=device),
            page_table=state.page_table,
            logit_rows=torch.arange(rows, dtype=torch.int32, device=device),
        )
        self.sampling = DeviceSampling(random=RandomStage(temperature.view(torch.float32), *keys))
        """Draws a token where the temperature is not 0; the likeliest token elsewhere."""

    def fill(self, batch: Batch, sampling: HostSampling, after: Int32Array = _NOTHING) -> tuple[Batch, torch.Tensor]:
        """Write a step into the buffers, with one copy from the host.

        Args:
            batch: at most B decode rows, with at most B page-table changes.
            sampling: of the batch; only its random stage is used here.
            after: int32[words] for the time after the replay, which travels along; no graph can read it.

        Returns:
            The batch padded to B rows, and ``after`` on the device.
        """
        padded = pad_batch(batch, self.rows, self.dummy_slot)
        host = torch.empty(self._packed.shape, dtype=torch.int32, pin_memory=self._packed.is_cuda)
        slots, seq_lens, page_index, page_value, *random = host.numpy()
        slots[:] = padded.slots
        seq_lens[:] = padded.seq_lens
        # Unused entries write what is there already: the dummy page at the start of the dummy row.
        _put(page_index, batch.page_index, self.dummy_slot * self.state.page_table.shape[1])
        _put(page_value, batch.page_value, self.state.dummy_page)
        for target, values in zip(random, sampling.random or (), strict=False):
            _put(target, values.view(np.int32), 0)
        if sampling.random is None:
            random[0][:] = 0
        arrived = self._send(host, after)
        self.derive()
        return padded, arrived

    def _send(self, host: torch.Tensor, after: Int32Array) -> torch.Tensor:
        """Copy the step to where the graphs read. With ``after``, whose size differs from step to step, it goes by way
        of newly allocated memory: a second copy from the host would cost more than one on the device."""
        if len(after) == 0:
            self._packed.copy_(host, non_blocking=True)
            return self._packed.new_empty(0)
        staged = to_device({"step": host.numpy().ravel(), "after": after}, self._packed.device)
        self._packed.copy_(staged["step"].view_as(self._packed))
        return staged["after"]

    def derive(self) -> None:
        """Apply the page-table changes, then look up where each row's new token is, and where its KV goes."""
        inputs, tables = self.inputs, self.state
        if self._kernels is not None:
            self._kernels.derive_inputs(
                slots=inputs.slots,
                seq_lens=inputs.seq_lens,
                tokens=tables.tokens,
                page_table=tables.page_table,
                page_index=self.page_index,
                page_value=self.page_value,
                page_size=self.page_size,
                positions=inputs.positions,
                out_locs=inputs.out_locs,
                input_ids=inputs.input_ids,
            )
            return
        tables.page_table.view(-1)[self.page_index] = self.page_value
        torch.sub(inputs.seq_lens, 1, out=inputs.positions)
        inputs.input_ids.copy_(tables.input_ids(inputs.slots, inputs.positions))
        pages = tables.page_table[inputs.slots, inputs.positions // self.page_size]
        inputs.out_locs.copy_(pages * self.page_size + inputs.positions % self.page_size)

    def append(self, tokens: torch.Tensor) -> None:
        """Write sampled tokens, int32[B], behind the rows' sequences."""
        if self._kernels is not None:
            self._kernels.append_tokens(self.inputs.slots, self.inputs.seq_lens, self.state.tokens, tokens)
            return
        self.state.append(self.inputs.slots, self.inputs.seq_lens, tokens)


def _put(target: Int32Array, values: Int32Array, rest: int) -> None:
    target[: len(values)] = values
    target[len(values) :] = rest
