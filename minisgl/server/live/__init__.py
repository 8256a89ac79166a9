"""The live page: the engine's state, drawn while it serves."""
