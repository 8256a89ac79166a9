"""The measurements behind every number in the book: ``python -m minisgl.bench``.

The ``run_`` functions take the options of their commands, which ``__main__`` explains. They raise `ConfigError` where
they need more CUDA devices than there are.
"""
