"""The operator's tuning profiles: schema, loading, inheritance, resolution, explanation."""
