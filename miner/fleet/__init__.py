"""Which GPUs there are, and who holds which until when."""
