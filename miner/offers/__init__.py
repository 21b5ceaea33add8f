"""Offers: which ones this miner takes."""
