"""Facts about base models: names, published shapes, families."""
