"""Parts that touch the operating system: files, filters of system calls, privileges.

Import nothing here: scripts that run without our dependencies load modules of this package.
"""
