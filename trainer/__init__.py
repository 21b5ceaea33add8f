"""What runs inside the container, or as a local process: never imported by the daemon."""
