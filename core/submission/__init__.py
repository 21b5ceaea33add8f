"""A submission: the folder that a training leaves, what is published of it, and whether it is worth it.

Pure and light: the daemon checks with it what it uploads, the trainer what it puts in place.
"""
