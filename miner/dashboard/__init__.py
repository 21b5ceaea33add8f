"""The operator's page: a process of its own that reads daemons through their operator ports."""
