"""The environments of tournaments: the evaluator's games and prompts, players, rows and matches."""
