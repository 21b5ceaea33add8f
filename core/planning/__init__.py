"""From a task, a model, the GPUs that are there and a profile to one training plan."""
