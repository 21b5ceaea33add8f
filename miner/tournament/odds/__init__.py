"""The odds of a tournament: its bracket by simulation, the field by past ones, and the worth of an entry."""
