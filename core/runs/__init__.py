"""What the daemon and the trainer share of a run: its files, its progress, the remedies after a failure."""
