"""A task's data as its evaluation reads it, written beside the original and never into it."""
