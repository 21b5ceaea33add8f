"""Kinds of requests that a load run sends."""

from __future__ import annotations

from enum import StrEnum


class LoadKind(StrEnum):
    OFFER = "offer"
    #: Under names never seen: of 240 shapes, or every one of a shape of its own.
    SHAPED_OFFER = "shaped-offer"
    NEW_OFFER = "new-offer"
    IMAGE_OFFER = "image-offer"
    START = "start"
    SUBMISSION = "submission"
    HEALTH = "health"
    BAD_SIGNATURE = "bad-signature"
    BAD_NONCE = "bad-nonce"
    OLD_NONCE = "old-nonce"
    UNKNOWN_HOTKEY = "unknown-hotkey"
    MISSING_HEADER = "missing-header"
    GARBAGE = "garbage"
