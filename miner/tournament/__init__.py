"""Tournaments: check, prepare and rehearse an entry, and read what the field trains with.

`rules` has what validators do, with its date. Nothing here is needed by the daemon.
"""
