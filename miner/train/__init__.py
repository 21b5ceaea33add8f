"""Trainings of the operator's own with the native trainer: no validator, no daemon, no container."""
