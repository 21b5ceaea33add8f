"""Reward code from outside: checked, isolated, called with a time limit. Light: forked and run alone."""
