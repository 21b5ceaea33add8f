"""What a validator does with an entry, on the operator's own Docker."""
