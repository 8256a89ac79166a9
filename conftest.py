"""Plugins of the whole test run, notebooks included."""

pytest_plugins = ["tests.skip_budget", "tests.default_model", "tests.notebook_kernels"]
