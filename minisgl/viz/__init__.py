"""The reader's tools: pictures of live objects, listings of live source, tables. They only read the engine."""

from minisgl.viz.attention_map import attention_map
from minisgl.viz.attention_mask import attention_mask
from minisgl.viz.bars import bars
from minisgl.viz.batch_arrays import batch_arrays
from minisgl.viz.chapters import chapter_map
from minisgl.viz.chart import Axis, chart
from minisgl.viz.distribution import distribution
from minisgl.viz.hash_chain import hash_chain
from minisgl.viz.host_device import host_device_timeline
from minisgl.viz.kernel_timeline import kernel_timeline
from minisgl.viz.layer import layer_flow
from minisgl.viz.lengths import Lengths, length_strip
from minisgl.viz.loads import loads
from minisgl.viz.markdown import Markdown, table
from minisgl.viz.measured import Measured, measured
from minisgl.viz.memory_budget import engine_memory, memory_budget
from minisgl.viz.memory_curve import memory_curve
from minisgl.viz.packed_rows import packed_rows
from minisgl.viz.pages import page_map
from minisgl.viz.player import player
from minisgl.viz.pool_use import PoolUse, pool_use
from minisgl.viz.radix_tree import radix_tree
from minisgl.viz.rotation import rotation_dials
from minisgl.viz.schedule import schedule_player, schedule_timeline
from minisgl.viz.source import show
from minisgl.viz.svg import Picture
from minisgl.viz.timeline import step_timeline
from minisgl.viz.tokens import token_strip

__all__ = [
    "Axis",
    "Lengths",
    "Markdown",
    "Measured",
    "Picture",
    "PoolUse",
    "attention_map",
    "attention_mask",
    "bars",
    "batch_arrays",
    "chapter_map",
    "chart",
    "distribution",
    "engine_memory",
    "hash_chain",
    "host_device_timeline",
    "kernel_timeline",
    "layer_flow",
    "length_strip",
    "loads",
    "measured",
    "memory_budget",
    "memory_curve",
    "packed_rows",
    "page_map",
    "player",
    "pool_use",
    "radix_tree",
    "rotation_dials",
    "schedule_player",
    "schedule_timeline",
    "show",
    "step_timeline",
    "table",
    "token_strip",
]
