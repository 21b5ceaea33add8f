"""Logs without secrets, metrics and alerts. Imports neither the store nor the settings."""
