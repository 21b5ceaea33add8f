"""sd-scripts (kohya): recipe, rules and key table."""
