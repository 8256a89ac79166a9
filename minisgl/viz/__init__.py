"""The reader's tools: pictures of live objects, listings of live source, tables. They only read the engine."""

from minisgl.viz.attention_mask import attention_mask
from minisgl.viz.batch_arrays import batch_arrays
from minisgl.viz.chapters import chapter_map
from minisgl.viz.lengths import Lengths, length_strip
from minisgl.viz.markdown import Markdown, table
from minisgl.viz.pages import page_map
from minisgl.viz.radix_tree import radix_tree
from minisgl.viz.source import show
from minisgl.viz.svg import Picture
from minisgl.viz.timeline import step_timeline
from minisgl.viz.tokens import token_strip

__all__ = [
    "Lengths",
    "Markdown",
    "Picture",
    "chapter_map",
    "length_strip",
    "page_map",
    "radix_tree",
    "show",
    "step_timeline",
    "table",
    "token_strip",
]
