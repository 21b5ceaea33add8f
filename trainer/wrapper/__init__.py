"""The process around a training: starts the engine, watches it, ends it with all its children, says how it
went.

Nothing in here imports torch: it must start at once, cost little, and outlive whatever the engine does.
"""
