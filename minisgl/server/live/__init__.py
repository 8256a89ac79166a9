"""The live page: what the engine is doing right now, for anybody who watches."""
