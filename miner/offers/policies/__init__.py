"""The operator's acceptance policies: their schema, files, documentation and choice."""
