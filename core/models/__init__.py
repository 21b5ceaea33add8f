"""What is known of base models: facts, names, published shapes."""
