"""Parts of a run that the daemon and the trainer share: files, progress, remedies after a failure."""
