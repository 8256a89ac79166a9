"""A decoder layer as two lanes: what its blocks compute, and the residual stream beside them."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.layers import GatedMLP, MoE
from minisgl.models import DecoderLayer
from minisgl.viz.svg import WIDTH, Canvas, Picture

_MARGIN = 14
_GAP = 16.0
_BOX = 52.0
_STREAM = 88.0
"""From the top of a row's boxes down to the line of the residual stream."""
_ROW = 142.0


def layer_flow(layer: DecoderLayer) -> Picture:
    """Both blocks of a layer with the widths of their weights. ``T`` is the number of tokens in the step.

    Args:
        layer: a live one; it may be on the meta device.
    """
    flow = _Flow(layer.input_layernorm.weight.shape[0])
    flow.row("attention block", _attention_steps(layer))
    flow.row("MLP block", _mlp_steps(layer))
    return flow.picture()


def _attention_steps(layer: DecoderLayer) -> list[tuple[str, str]]:
    attention, spec = layer.self_attn, layer.self_attn.spec
    rotated = "rotate" if attention.q_norm is None else "norm, rotate"
    return [
        ("qkv_proj", _widths(attention.qkv_proj.weight.shape)),
        ("q, k, v heads", f"{spec.num_heads} + {spec.num_kv_heads} + {spec.num_kv_heads}"),
        (rotated, f"q, k: {spec.num_heads + spec.num_kv_heads} heads"),
        ("attend", f"T × {spec.num_heads} × {spec.head_dim}"),
        ("o_proj", _widths(attention.o_proj.weight.shape)),
    ]


def _mlp_steps(layer: DecoderLayer) -> list[tuple[str, str]]:
    mlp = layer.mlp
    if isinstance(mlp, MoE):
        experts, rows, hidden = mlp.experts.gate_up_proj.shape
        return [
            ("router", _widths(mlp.gate.weight.shape)),
            ("top k", f"{mlp.experts_per_token} of {experts}"),
            ("experts", f"{hidden} → {rows // 2} → {hidden}"),
            ("weighted sum", f"T × {hidden}"),
        ]
    assert isinstance(mlp, GatedMLP)
    return [
        ("gate_up_proj", _widths(mlp.gate_up_proj.weight.shape)),
        ("silu(gate) × up", f"T × {mlp.down_proj.weight.shape[1]}"),
        ("down_proj", _widths(mlp.down_proj.weight.shape)),
    ]


def _widths(shape: Sequence[int]) -> str:
    return f"{shape[1]} → {shape[0]}"


class _Flow:
    """One drawing: ``y`` is how far it has come.

    Args:
        width: of the residual stream.
    """

    def __init__(self, width: int) -> None:
        self.width = width
        self.canvas = Canvas()
        self.y = 14.0
        self.says: list[str] = []

    def row(self, title: str, steps: Sequence[tuple[str, str]]) -> None:
        canvas, top = self.canvas, self.y + 24
        canvas.text(_MARGIN, self.y + 12, title, "text strong", "start")
        middle, stream = top + _BOX / 2, top + _STREAM
        left, right = _MARGIN + 48.0, WIDTH - _MARGIN - 22.0
        norm = 78.0
        box = (right - left - norm - len(steps) * _GAP) / len(steps)
        for lane, name in ((middle, "x"), (stream, "residual")):
            self._arrow(_MARGIN, left, lane)
            canvas.text(_MARGIN, lane - 7, name if lane == middle else "stream", "muted small", "start")
        canvas.box(left, top, norm, stream + 14 - top, "shared")
        canvas.text(left + norm / 2, top + 42, "add,", "text small strong")
        canvas.text(left + norm / 2, top + 59, "then norm", "text small strong")
        x = left + norm
        for name, detail in steps:
            self._arrow(x, x + _GAP, middle)
            canvas.box(x + _GAP, top, box, _BOX)
            canvas.text(x + _GAP + box / 2, top + 22, name, "text small strong")
            canvas.text(x + _GAP + box / 2, top + 40, detail, "muted small")
            x += _GAP + box
        self._arrow(x, WIDTH - _MARGIN, middle)
        canvas.text(WIDTH - _MARGIN, middle - 7, "x", "muted small", "end")
        self._arrow(left + norm, WIDTH - _MARGIN, stream)
        sum_width = f"the sum, T × {self.width}, to the next norm"
        canvas.text((left + norm + right) / 2, stream - 7, sum_width, "muted small")
        self.says.append(f"{title}: x is added to the stream and normed, then {', '.join(' '.join(s) for s in steps)}.")
        self.y += _ROW

    def _arrow(self, start: float, stop: float, y: float) -> None:
        self.canvas.path(f"M{start:g} {y:g}H{stop:g}")
        self.canvas.path(f"M{stop:g} {y:g}l-7 -4v8z", "text")

    def picture(self) -> Picture:
        return self.canvas.picture(self.y, "\n".join(self.says))
