"""The shared vocabulary: tasks, the wire format, errors, units, job states, decisions."""
