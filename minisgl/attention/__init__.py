"""Attention backends: a reference in PyTorch, our Triton kernels, cascade, FlashInfer, and hybrids of two."""
