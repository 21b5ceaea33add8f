"""ai-toolkit: recipe, rules and key table."""
