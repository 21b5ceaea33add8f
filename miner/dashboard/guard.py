"""Access to the page: hosts and origins, the password, browser sessions, and headers of every reply.

It wraps the whole application, its websocket too. Nothing behind it is reached by a stranger's request.
"""

from __future__ import annotations

import hmac
import html
import ipaddress
import math
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlsplit

from pydantic import SecretStr
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from miner.settings.values import is_loopback
from miner.support.addresses import client_network
from miner.support.rate_limits import RateLimit, TokenBuckets

COOKIE = "god-miner-dashboard"
#: The key of the scope by which pages find their session.
SESSION_KEY = "dashboard_session"
#: Without a request for so long, a browser session is over.
SESSION_SECONDS = 12 * 3600.0
MAX_SESSIONS = 1000
#: Whether the process answers, which everybody may ask.
HEALTH_PATH = "/healthz"
MAX_FORM_BYTES = 4096
#: Wrong passwords from one network, and from all.
LOGIN_RATE = RateLimit(5 / 60, 5)
ALL_LOGINS_RATE = RateLimit(0.5, 50)

SECURITY_HEADERS = {
    # NiceGUI's page is made of inline scripts and styles, and its charts' options of functions.
    "content-security-policy": "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self' data:; connect-src 'self'; "
    "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # Not "no-referrer": the form of the password would come from the origin "null".
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


@dataclass
class BrowserSession:
    """One browser until it is closed."""

    key: str
    used_at: float
    logged_in: bool
    #: The operator tokens that were typed into it, by daemon. They never go back to the browser.
    tokens: dict[str, str] = field(default_factory=dict)
    ended: bool = False

    @property
    def is_over(self) -> bool:
        return self.ended or time.monotonic() - self.used_at > SESSION_SECONDS


class BrowserSessions:
    """The newest sessions, by what their cookie holds."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, BrowserSession] = OrderedDict()

    def find(self, key: str) -> BrowserSession | None:
        session = self._known.get(key)
        if session is None:
            return None
        if session.is_over:
            self.end(key)
            return None
        session.used_at = time.monotonic()
        self._known.move_to_end(key)
        return session

    def begin(self, *, logged_in: bool) -> BrowserSession:
        session = BrowserSession(secrets.token_urlsafe(32), time.monotonic(), logged_in)
        self._known[session.key] = session
        if len(self._known) > MAX_SESSIONS:
            self.end(next(iter(self._known)))
        return session

    def end(self, key: str) -> None:
        """Pages that are still open show what they show, but can change nothing any more."""
        if (session := self._known.pop(key, None)) is not None:
            session.ended = True
            session.tokens.clear()


class Guard:
    """The application behind the checks. Without a password, everybody who can reach the port may read."""

    def __init__(
        self, app: ASGIApp, host: str, names: Iterable[str] = (), password: SecretStr | None = None
    ) -> None:
        self._app = app
        self._names = {"localhost", host.lower(), *names}
        self._password = password
        self._sessions = BrowserSessions()
        self._failures = TokenBuckets(LOGIN_RATE)
        self._all_failures = TokenBuckets(ALL_LOGINS_RATE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        if (refusal := self._refusal(headers)) is not None:
            await self._refuse(scope, receive, send, refusal)
            return
        session = self._sessions.find(_cookie(headers))
        if scope["type"] == "http" and scope["path"] in ("/login", "/logout"):
            await self._log_in_or_out(scope, receive, send, session)
            return
        if session is None and self._password is None and _wants_page(scope, headers):
            session = self._sessions.begin(logged_in=True)
            send = _setting_cookie(send, session, secure=_is_tls(scope, headers))
        is_open = scope["type"] == "http" and scope["path"] == HEALTH_PATH
        if self._password is not None and not is_open and (session is None or not session.logged_in):
            reply: Response = PlainTextResponse("log in first", 401)
            if _wants_page(scope, headers):
                reply = RedirectResponse("/login", 303)
            await self._refuse(scope, receive, send, reply)
            return
        scope[SESSION_KEY] = session
        await self._app(scope, receive, _with_security_headers(send))

    def _refusal(self, headers: Headers) -> Response | None:
        """A name that is not ours is a page of a stranger's whose name leads here (DNS rebinding)."""
        host = headers.get("host", "")
        name = _host_name(host)
        if not (name in self._names or _is_address(name)):
            text = (
                f"this page is not known as {name!r}; use its address, or add the name to DASHBOARD_NAMES\n"
            )
            return PlainTextResponse(text, 421)
        origin = headers.get("origin")
        if origin is not None and _host_of(origin) != host.lower():
            return PlainTextResponse("requests of other pages are refused\n", 403)
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and _is_not_navigation(headers):
            return PlainTextResponse("requests of other pages are refused\n", 403)
        return None

    async def _refuse(self, scope: Scope, receive: Receive, send: Send, reply: Response) -> None:
        if scope["type"] == "websocket":
            await receive()  # its connect
            await send({"type": "websocket.close", "code": 1008})
            return
        await reply(scope, receive, _with_security_headers(send))

    async def _log_in_or_out(
        self, scope: Scope, receive: Receive, send: Send, session: BrowserSession | None
    ) -> None:
        headers = Headers(scope=scope)
        reply: Response
        if self._password is None:
            reply = RedirectResponse("/", 303)
        elif scope["method"] == "POST" and scope["path"] == "/logout":
            if session is not None:
                self._sessions.end(session.key)
            reply = RedirectResponse("/login", 303)
            reply.delete_cookie(COOKIE)
        elif scope["method"] == "POST":
            address = scope["client"][0] if scope.get("client") else ""
            reply = self._log_in(await _password_of(receive), address, secure=_is_tls(scope, headers))
        elif session is not None and session.logged_in:
            reply = RedirectResponse("/", 303)
        else:
            reply = HTMLResponse(_login_page())
        reply.headers["cache-control"] = "no-store"
        await reply(scope, receive, _with_security_headers(send))

    def _log_in(self, typed: str, address: str, *, secure: bool) -> Response:
        assert self._password is not None
        network = client_network(address)
        if self._failures.is_empty(network) or self._all_failures.is_empty(""):
            wait = max(self._failures.seconds_until_next(network), self._all_failures.seconds_until_next(""))
            text = f"Too many wrong passwords. Try again in {math.ceil(wait)} s."
            return HTMLResponse(_login_page(text), 429, {"retry-after": str(math.ceil(wait))})
        if not hmac.compare_digest(typed.encode(), self._password.get_secret_value().encode()):
            self._failures.take(network)
            self._all_failures.take("")
            return HTMLResponse(_login_page("That is not the password."), 401)
        reply = RedirectResponse("/", 303)
        reply.headers["set-cookie"] = _cookie_text(self._sessions.begin(logged_in=True), secure=secure)
        return reply


def _host_name(host: str) -> str:
    """The name in a Host header, without its port."""
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _host_of(origin: str) -> str | None:
    """Return name and port of an Origin header, or None if it is not an address."""
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return None


def _is_address(name: str) -> bool:
    """Nobody else's name leads to what was asked for by its address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_not_navigation(headers: Headers) -> bool:
    """A link from elsewhere may lead here; it only opens the page."""
    return headers.get("sec-fetch-mode") != "navigate"


def _wants_page(scope: Scope, headers: Headers) -> bool:
    return scope["type"] == "http" and scope["method"] == "GET" and "text/html" in headers.get("accept", "")


def _is_tls(scope: Scope, headers: Headers) -> bool:
    """Whoever lies about it only keeps the cookie from themselves."""
    return scope.get("scheme") == "https" or headers.get("x-forwarded-proto") == "https"


def _cookie(headers: Headers) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found else ""


def _cookie_text(session: BrowserSession, *, secure: bool) -> str:
    return f"{COOKIE}={session.key}; Path=/; HttpOnly; SameSite=Strict" + ("; Secure" if secure else "")


def _setting_cookie(send: Send, session: BrowserSession, *, secure: bool) -> Send:
    async def send_with_cookie(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).append("set-cookie", _cookie_text(session, secure=secure))
        await send(message)

    return send_with_cookie


def _with_security_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in SECURITY_HEADERS.items():
                headers[name] = value
        await send(message)

    return send_with_headers


async def _password_of(receive: Receive) -> str:
    """The field of the form; a body that is too long has none."""
    body = b""
    while True:
        message = await receive()
        body += bytes(message.get("body", b""))
        if len(body) > MAX_FORM_BYTES:
            return ""
        if message["type"] != "http.request" or not message.get("more_body"):
            break
    return parse_qs(body.decode(errors="replace")).get("password", [""])[0]


def _login_page(problem: str = "") -> str:
    shown = f'<p role="alert">{html.escape(problem)}</p>' if problem else ""
    return _LOGIN_PAGE.replace("PROBLEM", shown)


_LOGIN_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>god-miner</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<style>
body { font: 15px/1.5 system-ui, sans-serif; margin: 0; min-height: 90vh;
  display: grid; place-items: center; }
form { display: grid; gap: 12px; width: min(300px, 86vw); }
h1 { font-size: 18px; font-weight: 600; margin: 0; }
label { display: grid; gap: 4px; }
input, button { font: inherit; padding: 8px 10px; border-radius: 4px; border: 1px solid GrayText; }
button { background: #1f5fa8; color: #fff; border-color: #1f5fa8; cursor: pointer; }
:focus-visible { outline: 2px solid #3b82d0; outline-offset: 2px; }
p { margin: 0; color: light-dark(#b3261e, #ff9a90); }
</style></head><body><main><form method="post" action="/login">
<h1>god-miner</h1>PROBLEM
<label>Password of the page
<input name="password" type="password" autocomplete="current-password" required autofocus></label>
<button>Log in</button></form></main></body></html>
"""


def is_exposed(host: str) -> bool:
    """Return whether other machines reach the port, and would see the password in the open."""
    return not is_loopback(host)
