"""A card's first minutes: what it reaches, beside the planner's own expectation (docs/gpu.md)."""
