"""Notifications of alerts and reports through Apprise."""
