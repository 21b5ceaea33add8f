"""The books: one SQLite file that knows every offer, decision, job and used nonce."""
