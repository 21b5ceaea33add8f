"""Rendering a plan into an engine's own configuration, and checking the result."""
