"""Training code: runs inside the container or as a local process, and is never imported by the daemon."""
