"""Plugins of the whole test run, notebooks included."""

pytest_plugins = ["tests.default_model"]
