"""Bytes and seconds as people read them."""

from __future__ import annotations

from minisgl.viz.svg import counted


def byte_size(count: int) -> str:
    """In binary units: ``1.50 GiB``."""
    size, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        del units[0]
    return counted(count, "byte") if units[0] == "bytes" else f"{size:.2f} {units[0]}"


def duration(seconds: float) -> str:
    """``12 µs``, ``3.45 ms``, ``1.20 s``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"
