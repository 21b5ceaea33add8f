"""The field's training settings beside our own plans."""
