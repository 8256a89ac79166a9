"""Tensor parallelism: collectives, control planes, and the processes of the ranks."""
