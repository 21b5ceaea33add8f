"""The backends, which run trainings: one folder for each backend, registered by its name in `BackendKind`."""

# Before any backend: `Settings` takes in their sections.
import miner.settings  # noqa: F401
