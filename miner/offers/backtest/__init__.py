"""Try policies on past, synthetic and representative offers."""
