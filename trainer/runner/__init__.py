"""The process around a training: starts the engine, watches it, ends it with all its children. No torch."""
