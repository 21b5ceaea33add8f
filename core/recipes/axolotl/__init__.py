"""Axolotl: recipe, rules and key table."""
