"""One rank: the model, its KV memory, the sampler, and the runner that computes a step."""
