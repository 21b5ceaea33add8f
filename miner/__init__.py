"""The daemon: answers validators, decides on offers, keeps the books and runs the jobs."""

__version__ = "0.1.0"
