"""From files to a checked policy."""

from __future__ import annotations

import hashlib

from miner.offers.policies.schema import Policy


class LoadedPolicy:
    """A policy and the digest of the text that it was read from."""

    def __init__(self, name: str, terms: Policy, text: str = "") -> None:
        self.name = name
        self.terms = terms
        self.digest = hashlib.sha256((text or terms.model_dump_json()).encode()).hexdigest()
