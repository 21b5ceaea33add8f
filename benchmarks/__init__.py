"""Measured claims, each re-runnable: `python -m benchmarks [name…]`. Nothing here asserts a time."""
