"""Render a plan into an engine's own configuration, and check the result."""
