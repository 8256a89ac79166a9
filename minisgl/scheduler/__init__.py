"""Continuous batching: which requests run in a step, and which pages they get."""
