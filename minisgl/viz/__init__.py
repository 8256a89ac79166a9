"""The reader's tools: pictures of live objects, listings of live source, tables. They only read the engine."""

from minisgl.viz.attention_map import attention_map
from minisgl.viz.attention_mask import attention_mask
from minisgl.viz.bars import bars
from minisgl.viz.batch_arrays import batch_arrays
from minisgl.viz.chapters import chapter_map
from minisgl.viz.chart import Axis, chart
from minisgl.viz.collective_costs import BreakEven, break_evens, collective_costs
from minisgl.viz.decoder_slices import decoder_slices
from minisgl.viz.detokenizer_steps import DetokenizerStep, detokenizer_steps
from minisgl.viz.distribution import distribution
from minisgl.viz.hash_chain import hash_chain
from minisgl.viz.host_device import host_device_timeline
from minisgl.viz.kernel_timeline import kernel_timeline
from minisgl.viz.latency_curve import LoadPoint, knee, latency_curve
from minisgl.viz.layer import layer_flow
from minisgl.viz.lengths import Lengths, length_strip
from minisgl.viz.loads import loads
from minisgl.viz.markdown import Markdown, table
from minisgl.viz.measured import Measured, has_cuda, kept, measured
from minisgl.viz.memory_budget import engine_memory, memory_budget
from minisgl.viz.memory_curve import memory_curve
from minisgl.viz.message_sequence import Message, message_player, message_sequence
from minisgl.viz.packed_rows import packed_rows
from minisgl.viz.pages import page_map
from minisgl.viz.player import Snapshots, player
from minisgl.viz.pool_use import PoolUse, pool_use
from minisgl.viz.prefix_groups import prefix_groups
from minisgl.viz.process_tree import Notice, ProcessState, QueueState, process_tree
from minisgl.viz.radix_tree import radix_tree
from minisgl.viz.reduce_player import reduce_player
from minisgl.viz.reduce_schedule import reduce_schedule
from minisgl.viz.rotation import rotation_dials
from minisgl.viz.schedule import schedule_player, schedule_timeline
from minisgl.viz.source import show
from minisgl.viz.svg import Picture
from minisgl.viz.timeline import step_timeline
from minisgl.viz.tokens import token_strip
from minisgl.viz.transfers import Transfer, one_shot_all_reduce, partial_sums, ring_all_reduce, two_shot_all_reduce
from minisgl.viz.weight_slices import SlicedMatrix, weight_slices

__all__ = [
    "Axis",
    "BreakEven",
    "DetokenizerStep",
    "Lengths",
    "LoadPoint",
    "Markdown",
    "Measured",
    "Message",
    "Notice",
    "Picture",
    "PoolUse",
    "ProcessState",
    "QueueState",
    "SlicedMatrix",
    "Snapshots",
    "Transfer",
    "attention_map",
    "attention_mask",
    "bars",
    "batch_arrays",
    "break_evens",
    "chapter_map",
    "chart",
    "collective_costs",
    "decoder_slices",
    "detokenizer_steps",
    "distribution",
    "engine_memory",
    "has_cuda",
    "hash_chain",
    "host_device_timeline",
    "kept",
    "kernel_timeline",
    "knee",
    "latency_curve",
    "layer_flow",
    "length_strip",
    "loads",
    "measured",
    "memory_budget",
    "memory_curve",
    "message_player",
    "message_sequence",
    "one_shot_all_reduce",
    "packed_rows",
    "page_map",
    "partial_sums",
    "player",
    "pool_use",
    "prefix_groups",
    "process_tree",
    "radix_tree",
    "reduce_player",
    "reduce_schedule",
    "ring_all_reduce",
    "rotation_dials",
    "schedule_player",
    "schedule_timeline",
    "show",
    "step_timeline",
    "table",
    "token_strip",
    "two_shot_all_reduce",
    "weight_slices",
]
