"""Measurements that print ratios and write them to JSON: ``python -m minisgl.bench``."""
