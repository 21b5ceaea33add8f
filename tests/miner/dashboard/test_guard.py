"""Who may see the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from pydantic import SecretStr
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from miner.dashboard.guard import COOKIE, SESSION_KEY, BrowserSessions, Guard
from tests.doubles.each import each

PASSWORD = "correct horse battery"


async def the_page(scope: Scope, receive: Receive, send: Send) -> None:
    """What is guarded."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.accept"})
        return
    session = scope[SESSION_KEY]
    await PlainTextResponse(f"the page of {session.key if session else 'nobody'}")(scope, receive, send)


@dataclass
class Answer:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def cookie(self) -> str:
        return self.headers.get("set-cookie", "").partition(";")[0]


async def ask(
    guard: Guard,
    path: str = "/",
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    body: bytes = b"",
    kind: str = "http",
    address: str = "10.9.8.7",
) -> Answer:
    sent = {"host": "127.0.0.1:7997", "accept": "text/html"} | dict(headers or {})
    scope: Scope = {
        "type": kind,
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "scheme": "http",
        "client": (address, 1),
        "headers": [(name.encode(), value.encode()) for name, value in sent.items()],
    }
    assert kind == "websocket" or Request(scope).method == method
    answer = Answer()

    async def receive() -> Message:
        return {"type": f"{kind}.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        elif message["type"] == "websocket.close":
            answer.status = message["code"]
        elif message["type"] == "websocket.accept":
            answer.status = 101
        answer.body += message.get("body", b"")

    await guard(scope, receive, send)
    return answer


async def log_in(guard: Guard, password: str = PASSWORD, **more: str) -> Answer:
    body = f"password={password}".replace(" ", "+").encode()
    return await ask(guard, "/login", "POST", body=body, **more)  # type: ignore[arg-type]


@pytest.fixture
def open_guard() -> Guard:
    return Guard(the_page, "127.0.0.1")


@pytest.fixture
def locked() -> Guard:
    return Guard(the_page, "0.0.0.0", ["miner.example.org"], SecretStr(PASSWORD))


async def test_on_loopback_every_browser_gets_a_session_of_its_own(open_guard: Guard) -> None:
    first = await ask(open_guard)
    assert first.status == 200
    assert "HttpOnly; SameSite=Strict" in first.headers["set-cookie"]
    again = await ask(open_guard, headers={"cookie": first.cookie})
    assert "set-cookie" not in again.headers
    assert again.body == first.body != (await ask(open_guard)).body


@each("host", ["evil.example", "127.0.0.1.evil.example:7997", "", "localhost.evil"])
@each("kind", ["http", "websocket"])
async def test_a_name_that_is_not_ours_is_refused(open_guard: Guard, host: str, kind: str) -> None:
    assert (await ask(open_guard, headers={"host": host}, kind=kind)).status in (421, 1008)


@each("host", ["localhost:8080", "[::1]:7997", "192.168.1.4:7997"])
async def test_a_tunnel_and_an_address_are_ours(open_guard: Guard, host: str) -> None:
    assert (await ask(open_guard, headers={"host": host})).status == 200


@each("kind", ["http", "websocket"])
async def test_the_origin_has_to_be_the_page_itself(open_guard: Guard, kind: str) -> None:
    for origin in ("https://evil.example", "http://127.0.0.1:3000", "http://[", "null"):
        assert (await ask(open_guard, headers={"origin": origin}, kind=kind)).status in (403, 1008)
    own = {"origin": "http://127.0.0.1:7997"}
    assert (await ask(open_guard, headers=own, kind=kind)).status in (200, 101)


async def test_behind_a_proxy_the_page_has_its_name_and_a_secure_cookie(locked: Guard) -> None:
    headers = {"host": "miner.example.org", "x-forwarded-proto": "https"}
    answer = await ask(locked, "/login", "POST", headers, f"password={PASSWORD}".encode().replace(b" ", b"+"))
    assert answer.status == 303
    assert answer.headers["set-cookie"].endswith("; Secure")


async def test_nothing_is_reached_without_the_password(locked: Guard) -> None:
    assert (await ask(locked)).headers["location"] == "/login"
    assert (await ask(locked, "/_nicegui/app.js", headers={"accept": "*/*"})).status == 401
    assert (await ask(locked, kind="websocket")).status == 1008
    assert (await ask(locked, headers={"cookie": f"{COOKIE}=guessed"})).status == 303
    page = await ask(locked, "/login")
    assert page.status == 200
    assert b'type="password"' in page.body


async def test_the_password_opens_the_page_until_one_logs_out(locked: Guard) -> None:
    cookie = {"cookie": (await log_in(locked)).cookie}
    assert (await ask(locked, headers=cookie)).status == 200
    assert (await ask(locked, headers=cookie, kind="websocket")).status == 101
    await ask(locked, "/logout", "POST", cookie)
    assert (await ask(locked, headers=cookie)).status == 303


def test_the_end_of_a_session_takes_its_tokens_from_pages_that_are_still_open() -> None:
    sessions = BrowserSessions()
    session = sessions.begin(logged_in=True)
    session.tokens["this machine"] = "the operator's"
    sessions.end(session.key)
    assert (session.is_over, session.tokens, sessions.find(session.key)) == (True, {}, None)


async def test_guessing_is_slowed_down_for_whoever_guesses(locked: Guard) -> None:
    for _ in range(5):
        assert (await log_in(locked, "wrong")).status == 401
    answer = await log_in(locked, PASSWORD)
    assert answer.status == 429
    assert int(answer.headers["retry-after"]) > 0
    assert (await log_in(locked, address="10.1.1.1")).status == 303


async def test_a_form_that_is_too_long_is_no_password(locked: Guard) -> None:
    body = f"password={PASSWORD}".encode() + b"&x=" + b"y" * 10_000
    assert (await ask(locked, "/login", "POST", body=body)).status == 401


async def test_every_reply_says_that_no_other_page_may_frame_it(open_guard: Guard, locked: Guard) -> None:
    for guard, path, headers in (
        (open_guard, "/", {}),
        (open_guard, "/", {"host": "evil"}),
        (locked, "/login", {}),
    ):
        answer = await ask(guard, path, headers=headers)
        assert answer.headers["x-frame-options"] == "DENY"
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
