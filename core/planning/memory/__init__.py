"""GPU memory of one rank: what stays, what passes through, and the worst moment."""
