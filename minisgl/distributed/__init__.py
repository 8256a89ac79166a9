"""Tensor parallelism: one model on several devices."""
