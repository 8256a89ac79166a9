"""Model architectures, their configuration, and loading their weights."""
