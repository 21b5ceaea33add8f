"""What everybody talks about: tasks, the wire format, errors, units, job states, decisions."""
