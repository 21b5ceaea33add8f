"""What runs an attempt: containers, local processes, later a cluster."""
