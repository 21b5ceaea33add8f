"""Measurements of GPUs and trainings, rules on them, alerts and reports."""
