"""``python -m minisgl.chat``: a chat in the terminal, with a server or with an engine of its own."""
