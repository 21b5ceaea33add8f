"""The validators' metrics on our own rows: they choose the best checkpoint, and `god-miner eval` prints them."""
