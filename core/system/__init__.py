"""What touches the operating system: files, and filters of system calls.

Import nothing here: scripts that run without our dependencies load `core.system.seccomp`.
"""
