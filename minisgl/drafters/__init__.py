"""Drafters: they guess the next tokens of a request, which the model then verifies in one step."""
