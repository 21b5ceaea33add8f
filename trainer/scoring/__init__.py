"""The validators' metrics on our own rows: they choose the best checkpoint and are what `eval` prints."""
