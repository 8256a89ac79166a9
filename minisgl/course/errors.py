"""What can go wrong in the course, other than a test."""

from __future__ import annotations

from minisgl.errors import MiniSGLError


class CourseError(MiniSGLError):
    """A command of the course cannot do what it was asked. The message says what to do instead."""
