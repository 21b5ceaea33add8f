"""Trainings as jobs of a Slurm cluster."""
