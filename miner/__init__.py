"""The daemon: answers validators, decides on offers, stores what was answered and runs the jobs."""

__version__ = "0.1.0"
