"""Chapters 4, 6 and 7: KV memory in pages, and the caches that let requests share them.

This file imports nothing, so that chapter 4's modules do not pull in chapter 6's and 7's.
"""
