"""A validator's client: signs, posts and waits as theirs does, and says what it would conclude.

One request at a time, no retries, redirects not followed, the time limits of the reference. They are
httpx's limits per phase (connect, write, read), as there, so a reply that trickles in may take longer.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import quote

import httpx
from bittensor_core import Keypair

from core.errors import GodMinerError
from core.wire import TournamentType
from miner.dev.reading import (
    Conclusion,
    Reply,
    read_health,
    read_offer,
    read_start,
    read_submission,
    read_training_repo,
)
from miner.dev.samples import SampleTask
from miner.fiber import Signer, sign_headers

OFFER_LIMIT_S = 3.0
OTHER_LIMIT_S = 10.0
_SHOWN_BYTES = 2000


class BadAddress(GodMinerError):
    """The miner's address is no http(s) URL."""

    code = "bad_address"


@dataclass(frozen=True)
class Exchange:
    """One request and what came of it. `reply` is None when nothing came; then `failure` says why."""

    call: str
    method: str
    path: str
    latency_s: float
    reply: Reply | None
    failure: str | None
    conclusion: Conclusion

    @property
    def text(self) -> str:
        """The reply for a person to read, at most 2,000 bytes of it."""
        if self.reply is None:
            return self.failure or ""
        return self.reply.body[:_SHOWN_BYTES].decode("utf-8", "backslashreplace")

    @property
    def usable(self) -> bool:
        """Whether a reply came that is JSON and not the miner's own failure; a refusal is one, too."""
        if self.reply is None or self.reply.status >= 500:
            return False
        try:
            self.reply.json()
        except ValueError:
            return False
        return True

    def as_json(self) -> dict[str, Any]:
        return {
            "call": self.call,
            "request": f"{self.method} {self.path}",
            "status": None if self.reply is None else self.reply.status,
            "reply": self.text,
            "failure": self.failure,
            "latency_ms": round(self.latency_s * 1000, 3),
            "outcome": self.conclusion.outcome.value,
            "reason": self.conclusion.reason,
        }


class ValidatorClient:
    """Speaks for one validator hotkey to one miner. Use as `async with`."""

    def __init__(
        self,
        url: str,
        signer: Signer,
        miner_hotkey: str,
        *,
        compact_json: bool = False,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.url = _address(url)
        self.signer = signer
        self.miner_hotkey = miner_hotkey
        # Both spellings are in the wild: ", " and ": " from json.dumps, the compact one from newer httpx.
        self._separators = (",", ":") if compact_json else (", ", ": ")
        self._http = httpx.AsyncClient(
            base_url=self.url, transport=transport, trust_env=False, follow_redirects=False
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exception: object) -> None:
        await self._http.aclose()

    async def offer(self, task: SampleTask) -> Exchange:
        return await self.post("offer", task.offer_path, task.offer(), read_offer, OFFER_LIMIT_S)

    async def start(self, task: SampleTask) -> Exchange:
        return await self.post("start", task.start_path, task.start(), read_start, OTHER_LIMIT_S)

    async def submission(self, task_id: str, expected_repo_name: str | None = None) -> Exchange:
        path = f"/get_latest_model_submission/{quote(task_id, safe='')}"
        return await self.get("submission", path, lambda reply: read_submission(reply, expected_repo_name))

    async def training_repo(self, kind: TournamentType) -> Exchange:
        return await self.get("training repo", f"/training_repo/{kind.value}", read_training_repo)

    async def health(self) -> Exchange:
        """Unsigned, as a supervisor asks it."""
        return await self._send("health", "GET", "/healthz", {}, None, OTHER_LIMIT_S, read_health)

    async def post(
        self,
        call: str,
        path: str,
        payload: dict[str, Any],
        read: Callable[[Reply | None], Conclusion],
        limit_s: float,
    ) -> Exchange:
        body = json.dumps(payload, separators=self._separators).encode()
        headers = sign_headers(self.signer, self.miner_hotkey, body)
        return await self._send(call, "POST", path, headers, body, limit_s, read)

    async def get(self, call: str, path: str, read: Callable[[Reply | None], Conclusion]) -> Exchange:
        headers = sign_headers(self.signer, self.miner_hotkey, None)
        return await self._send(call, "GET", path, headers, None, OTHER_LIMIT_S, read)

    async def _send(
        self,
        call: str,
        method: str,
        path: str,
        headers: dict[str, str],
        body: bytes | None,
        limit_s: float,
        read: Callable[[Reply | None], Conclusion],
    ) -> Exchange:
        reply: Reply | None = None
        failure: str | None = None
        headers = {"Content-Type": "application/json", **headers}
        began = time.perf_counter()
        try:
            response = await self._http.request(method, path, headers=headers, content=body, timeout=limit_s)
            reply = Reply(response.status_code, response.content)
        except httpx.TimeoutException:
            failure = f"no answer within {limit_s:g} s"
        except httpx.HTTPError as error:
            failure = f"{type(error).__name__}: {error}"
        latency = time.perf_counter() - began
        return Exchange(call, method, path, latency, reply, failure, read(reply))


def _address(url: str) -> str:
    try:
        parsed = httpx.URL(url)
        usable = parsed.scheme in ("http", "https") and bool(parsed.host) and 0 < (parsed.port or 80) < 65536
    except httpx.InvalidURL:
        usable = False
    if not usable:
        raise BadAddress(f"url {url!r} is not the address of a miner; http://127.0.0.1:7999 is one")
    return url.rstrip("/")


class Forger:
    """Claims to be a key and signs with another one: what a miner must refuse."""

    def __init__(self, claimed: Signer) -> None:
        self.ss58_address = claimed.ss58_address
        self._own = Keypair.from_seed(secrets.token_bytes(32))

    def sign(self, message: bytes, /) -> bytes:
        signature: bytes = self._own.sign(message)
        return signature
