"""The reader's tools: pictures of live objects, listings of live source, tables. They only read the engine."""

from minisgl.viz.chapters import chapter_map
from minisgl.viz.markdown import Markdown, table
from minisgl.viz.pages import page_map
from minisgl.viz.source import show
from minisgl.viz.svg import Picture
from minisgl.viz.timeline import step_timeline
from minisgl.viz.tokens import token_strip

__all__ = ["Markdown", "Picture", "chapter_map", "page_map", "show", "step_timeline", "table", "token_strip"]
