"""A submission: select, mend and check the files of a training's folder, and put them in place.

Pure and light: the daemon checks what it uploads, the trainer what it puts in place.
"""
