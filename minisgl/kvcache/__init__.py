"""KV memory in pages, and the caches that share pages between requests."""
