"""Typed records of everything that the operator's port answers: HTTP returns them, `--json` prints them, and
the page, the renderers and `daemon_client` read them. The OpenAPI description comes from them.
"""
