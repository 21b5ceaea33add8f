"""Whole HTTP/1.1 requests as bytes, signed ahead of time, so that a load run measures the server.

The garbage kinds are what strangers send. Each is wrong in exactly one way and otherwise as good as the
real thing, since a request that is refused early costs the server nothing worth measuring.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from random import Random
from typing import Any

from bittensor_core import Keypair

from benchmarks.load_kind import LoadKind
from core.domain.tasks import OFFERED_TASKS, TaskType
from miner.chain.fiber import (
    MINER_HOTKEY,
    NONCE,
    NONCE_WINDOW_NS,
    SIGNATURE,
    VALIDATOR_HOTKEY,
    Signer,
    new_nonce,
    sign_headers,
)
from miner.dev.samples import SampleTask, sample_task, unknown_task

GARBAGE_KINDS = (
    LoadKind.BAD_SIGNATURE,
    LoadKind.BAD_NONCE,
    LoadKind.OLD_NONCE,
    LoadKind.UNKNOWN_HOTKEY,
    LoadKind.MISSING_HEADER,
)
SHAPES = 240
_REFUSALS = frozenset({400, 401, 403, 422, 429})

#: The statuses that are no error, per kind. A submission that nobody has made is a 404.
EXPECTED: dict[LoadKind, frozenset[int]] = {
    LoadKind.OFFER: frozenset({200}),
    LoadKind.SHAPED_OFFER: frozenset({200}),
    LoadKind.NEW_OFFER: frozenset({200}),
    LoadKind.IMAGE_OFFER: frozenset({200}),
    LoadKind.START: frozenset({200}),
    LoadKind.SUBMISSION: frozenset({200, 404}),
    LoadKind.HEALTH: frozenset({200}),
    LoadKind.GARBAGE: _REFUSALS,
} | dict.fromkeys(GARBAGE_KINDS, _REFUSALS)


class Presigner:
    """Makes requests of one kind from one validator to one miner; seeded, except for nonces and keys."""

    def __init__(self, host: str, signer: Signer, miner_hotkey: str, seed: int = 0) -> None:
        self.host = host
        self.signer = signer
        self.miner_hotkey = miner_hotkey
        self.random = Random(seed)
        self._stranger = Keypair.from_seed(secrets.token_bytes(32))
        self._text_types = cycle([kind for kind in OFFERED_TASKS if kind.is_text])
        self._makers: dict[LoadKind, Callable[[], bytes]] = {
            LoadKind.OFFER: lambda: self._signed_offer(sample_task(next(self._text_types), self.random)),
            LoadKind.SHAPED_OFFER: lambda: self._signed_offer(unknown_task(self.random, SHAPES)),
            LoadKind.NEW_OFFER: lambda: self._signed_offer(unknown_task(self.random)),
            LoadKind.IMAGE_OFFER: lambda: self._signed_offer(sample_task(TaskType.IMAGE, self.random)),
            LoadKind.START: self._signed_start,
            LoadKind.SUBMISSION: self._signed_submission,
            LoadKind.HEALTH: lambda: self._request("GET", "/healthz", {}),
            LoadKind.BAD_SIGNATURE: self._bad_signature,
            LoadKind.BAD_NONCE: self._bad_nonce,
            LoadKind.OLD_NONCE: self._old_nonce,
            LoadKind.UNKNOWN_HOTKEY: self._unknown_hotkey,
            LoadKind.MISSING_HEADER: self._missing_header,
        }

    def batch(self, kind: LoadKind, count: int) -> list[bytes]:
        kinds: Iterator[LoadKind] = cycle(GARBAGE_KINDS if kind is LoadKind.GARBAGE else (kind,))
        return [self._makers[next(kinds)]() for _ in range(count)]

    def _signed_offer(self, task: SampleTask) -> bytes:
        body = _encode(task.offer())
        return self._request(
            "POST", task.offer_path, sign_headers(self.signer, self.miner_hotkey, body), body
        )

    def _signed_start(self) -> bytes:
        task = sample_task(next(self._text_types), self.random)
        body = _encode(task.start())
        return self._request(
            "POST", task.start_path, sign_headers(self.signer, self.miner_hotkey, body), body
        )

    def _signed_submission(self) -> bytes:
        task = sample_task(TaskType.INSTRUCT, self.random)
        headers = sign_headers(self.signer, self.miner_hotkey, None)
        return self._request("GET", f"/get_latest_model_submission/{task.task_id}", headers)

    def _garbage(self, signer: Signer, nonce: str | None = None) -> tuple[SampleTask, dict[str, str], bytes]:
        task = sample_task(TaskType.INSTRUCT, self.random)
        body = _encode(task.offer())
        return task, sign_headers(signer, self.miner_hotkey, body, nonce), body

    def _bad_signature(self) -> bytes:
        """Well-formed and by a real key, only not by the one it claims: the dearest to refuse."""
        task, headers, body = self._garbage(self._stranger)
        headers[VALIDATOR_HOTKEY] = self.signer.ss58_address
        return self._request("POST", task.offer_path, headers, body)

    def _unknown_hotkey(self) -> bytes:
        task, headers, body = self._garbage(self._stranger)
        return self._request("POST", task.offer_path, headers, body)

    def _bad_nonce(self) -> bytes:
        return self._unsigned_with(f"{secrets.token_hex(10)}_{secrets.token_hex(5)}")

    def _old_nonce(self) -> bytes:
        return self._unsigned_with(new_nonce(time.time_ns() - 3 * NONCE_WINDOW_NS))

    def _unsigned_with(self, nonce: str) -> bytes:
        """A nonce that is wrong needs no true signature: it is refused before that is looked at."""
        task = sample_task(TaskType.INSTRUCT, self.random)
        headers = {
            VALIDATOR_HOTKEY: self.signer.ss58_address,
            MINER_HOTKEY: self.miner_hotkey,
            NONCE: nonce,
            SIGNATURE: f"0x{secrets.token_hex(64)}",
        }
        return self._request("POST", task.offer_path, headers, _encode(task.offer()))

    def _missing_header(self) -> bytes:
        task = sample_task(TaskType.INSTRUCT, self.random)
        headers = {VALIDATOR_HOTKEY: self.signer.ss58_address, MINER_HOTKEY: self.miner_hotkey}
        return self._request("POST", task.offer_path, headers, _encode(task.offer()))

    def _request(self, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> bytes:
        lines = [f"{method} {path} HTTP/1.1", f"host: {self.host}", "content-type: application/json"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if method == "POST":
            lines.append(f"content-length: {len(body)}")
        return "\r\n".join([*lines, "", ""]).encode() + body


def _encode(payload: dict[str, Any]) -> bytes:
    return json.dumps(payload).encode()
