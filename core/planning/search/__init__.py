"""Find the best candidate: what is required, what gives way, how many GPUs, how much training fits."""
