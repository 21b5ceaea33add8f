"""Facts and pure decisions: no network, no disk beyond reading YAML, no heavy imports."""
