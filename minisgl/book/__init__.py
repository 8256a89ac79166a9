"""The reader's tools: pictures of live objects, listings, tables, and the course. They only read the engine.

Public names are loaded when they are first used, so that the course's commands start quickly.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_NAMES = {
    "attempts": "check your_turn",
    "batches": "Lengths attention_mask batch_arrays length_strip padding score_grids token_strip",
    "charts": "Axis bars chart loads memory_curve",
    "collectives": "Transfer one_shot_all_reduce partial_sums reduce_player reduce_schedule ring_all_reduce "
    "two_shot_all_reduce",
    "detokenizing": "DetokenizerStep detokenizer_steps",
    "launches": "Call Launches Tape bytes_moved launch_graph tensors",
    "listings": "chapter_map show",
    "loading": "LoadRun file_map memory_stages watch_memory",
    "memory": "Array PoolUse array_map memory_budget page_map pool_use toy_page_map",
    "model": "attention_map distribution head_sharing layer_flow packed_rows rotation_dials softmax_panels",
    "numbers": "Stored nibbles number_bits number_line",
    "overview": "architecture scoreboard you_are_here",
    "players": "Snapshots live player",
    "prefix": "hash_chain prefix_groups radix_tree",
    "processes": "Message ProcessState message_sequence process_tree",
    "ranks": "FreeMemory compare_free_memory",
    "slices": "SlicedMatrix decoder_slices weight_slices",
    "speculation": "DraftLog DraftStep accept_or_resample draft_player draft_steps suffix_automaton",
    "svg": "Picture",
    "tables": "RESULTS Markdown Measured has_cuda kept measured table",
    "text_strips": "strips",
    "timelines": "host_device_timeline kernel_timeline launch_lanes schedule_player schedule_timeline step_timeline",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'minisgl.book' has no attribute {name!r}")
    return getattr(import_module(f"minisgl.book.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_HOMES)
