"""A validator's treatment of an entry, on the operator's own Docker."""
