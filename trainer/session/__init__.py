"""Decisions about a running training, whatever engine trains: clock, rate, best model, submission."""
