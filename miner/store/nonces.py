"""Used nonces in the store, so that none can be replayed after a restart."""

from __future__ import annotations

import sqlite3

from core.domain.errors import GodMinerError

_INSERT_NONCE = "INSERT INTO nonces (signer, nonce, expires_at) VALUES (?, ?, ?)"
_DROP_NONCES = (
    "DELETE FROM nonces WHERE (signer, nonce) IN "
    "(SELECT signer, nonce FROM nonces WHERE expires_at <= ? ORDER BY expires_at LIMIT ?)"
)
#: Half a million expired nonces, as after a busy hour and a restart, would hold the event loop for a second.
MAX_DROPPED_NONCES = 5000


class NonceUsed(GodMinerError):
    code = "nonce_used"


def insert_nonce(connection: sqlite3.Connection, signer: bytes, nonce: str, expires_at: float) -> None:
    try:
        connection.execute(_INSERT_NONCE, (signer, nonce, expires_at))
    except sqlite3.IntegrityError:
        raise NonceUsed("this nonce was used before; every request needs a new one") from None


def drop_nonces(connection: sqlite3.Connection, now: float) -> int:
    """Delete one batch of expired nonces, the oldest first; return the count."""
    return connection.execute(_DROP_NONCES, (now, MAX_DROPPED_NONCES)).rowcount


def live_nonces(connection: sqlite3.Connection, now: float) -> list[tuple[bytes, str, float]]:
    """Return signer, nonce and expiry of every nonce that could still be replayed."""
    rows = connection.execute("SELECT signer, nonce, expires_at FROM nonces WHERE expires_at > ?", (now,))
    return [(row["signer"], row["nonce"], row["expires_at"]) for row in rows]
