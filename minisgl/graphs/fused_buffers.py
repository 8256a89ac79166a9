"""The same buffers, with one kernel for each of the two things that happen around the model."""

from __future__ import annotations

import torch

from minisgl.graphs.buffers import DecodeBuffers
from minisgl.kernels.decode_inputs import append_tokens, derive_inputs


class FusedDecodeBuffers(DecodeBuffers):
    """`DecodeBuffers` on Triton kernels."""

    def derive(self) -> None:
        """See `DecodeBuffers.derive`."""
        derive_inputs(self.inputs, self.state.tokens, self.page_index, self.page_value, self.page_size)

    def append(self, tokens: torch.Tensor) -> None:
        """See `DecodeBuffers.append`."""
        append_tokens(self.inputs, self.state.tokens, tokens)
