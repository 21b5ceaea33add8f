"""The environment track: games and tasks that a model is trained to play, offline."""
