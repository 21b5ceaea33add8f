"""The store: one SQLite file with every offer, decision, job, event and used nonce."""
