"""The commands of `god-miner`, a file for each. Heavy imports stay inside the functions."""
