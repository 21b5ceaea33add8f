"""Jobs of the daemon: from a start request to a published model."""
