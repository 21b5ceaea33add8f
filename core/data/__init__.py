"""Datasets: rows, archives, pictures, and facts about them."""
