"""The measurements behind every number in the book: ``python -m minisgl.bench``."""
