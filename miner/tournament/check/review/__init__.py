"""The cheat review: an entry read as the reviewer of round 2 reads it, for data, weights and tricks."""
