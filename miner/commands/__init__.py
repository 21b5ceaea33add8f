"""The commands of `god-miner`, a module each. Heavy imports stay inside the functions."""
