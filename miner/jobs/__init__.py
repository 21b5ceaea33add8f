"""Jobs: what a start request becomes."""
