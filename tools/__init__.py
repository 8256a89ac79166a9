"""The book's machinery. Run from the root of the repository; nothing in `minisgl` imports it."""
