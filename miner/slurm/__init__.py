"""Slurm's own commands, and what they print."""
