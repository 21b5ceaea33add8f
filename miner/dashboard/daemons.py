"""The daemons that are shown: one connection to each, and one poller per address for all open pages.

A poller runs only while a page shows what it reads. A daemon that is lost stays on the page as it was, with
the time since when; its pollers go on asking, so that it is back without a reload.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from core.domain.errors import GodMinerError
from miner.daemon_client import TOKEN_FILE, NoDaemon, operator_url, stored_operator_token
from miner.settings import Settings

log = logging.getLogger(__name__)

_TIMEOUT_SECONDS = 8.0
#: A backtest and the check of a profile compute for a while.
SLOW_TIMEOUT_SECONDS = 120.0
#: How often a daemon that does not answer is asked again.
RETRY_SECONDS = 2.0

AnswerT = TypeVar("AnswerT", bound=BaseModel)
OnTrouble = Callable[["DaemonTrouble | None"], None]
OnLink = Callable[["DaemonLink"], None]


class DaemonTrouble(GodMinerError):
    """A daemon did not answer, or refused. `status` is None where it did not answer."""

    code = "daemon_trouble"

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class Feed(Generic[AnswerT]):
    """The answer of one address of a daemon, kept up to date for all pages that show it."""

    def __init__(self, link: DaemonLink, path: str, answer: type[AnswerT], every: float) -> None:
        self._link, self.path, self._answer, self._every = link, path, answer, every
        self.data: AnswerT | None = None
        self.trouble: DaemonTrouble | None = None
        self._readers: dict[object, tuple[Callable[[AnswerT], None], OnTrouble]] = {}
        self._task: asyncio.Task[None] | None = None

    @property
    def readers(self) -> int:
        return len(self._readers)

    def add(self, show: Callable[[AnswerT], None], show_trouble: OnTrouble) -> Callable[[], None]:
        """Pass on what is read from now on; the function that is returned ends it."""
        key = object()
        self._readers[key] = (show, show_trouble)
        if self._task is None:
            self._task = asyncio.create_task(self._poll())

        def remove() -> None:
            self._readers.pop(key, None)
            if not self._readers:
                self._stop()

        return remove

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None
        # What is shown next time must not be what was true when the last page was closed.
        self.data = self.trouble = None
        self._link.forget(self)

    async def look(self) -> None:
        """Read once, now."""
        try:
            self.data, self.trouble = await self._link.get(self.path, self._answer), None
        except DaemonTrouble as error:
            self.trouble = error
        for show, show_trouble in list(self._readers.values()):
            try:
                show_trouble(self.trouble)
                if self.trouble is None and self.data is not None:
                    show(self.data)
            except Exception:  # one page that cannot show it must not keep it from the others
                log.exception("a page cannot show %s", self.path)

    async def _poll(self) -> None:
        while True:
            began = time.monotonic()
            await self.look()
            pause = self._every if self.trouble is None else max(self._every, RETRY_SECONDS)
            await asyncio.sleep(max(0.1, pause - (time.monotonic() - began)))


class DaemonLink:
    """One daemon. `lost_at` is None while it answers, and before it was first asked."""

    def __init__(
        self,
        name: str,
        find_url: Callable[[], str],
        find_token: Callable[[], str],
        token_file: str = TOKEN_FILE,
    ) -> None:
        self.name, self._token_file = name, token_file
        self._find_url, self._find_token = find_url, find_token
        self.lost_at: float | None = None
        self.trouble = ""
        self._feeds: dict[str, Feed[Any]] = {}
        self._listeners: dict[object, OnLink] = {}
        self._client: httpx.AsyncClient | None = None

    def watch(
        self,
        path: str,
        answer: type[AnswerT],
        every: float,
        show: Callable[[AnswerT], None],
        show_trouble: OnTrouble,
    ) -> Callable[[], None]:
        """Call `show` with the answer to GET `path`, now if it is known, and after every look."""
        feed: Feed[AnswerT] | None = self._feeds.get(path)
        if feed is None:
            feed = self._feeds[path] = Feed(self, path, answer, every)
        if feed.data is not None:
            show(feed.data)
        if feed.trouble is not None:
            show_trouble(feed.trouble)
        return feed.add(show, show_trouble)

    def listen(self, on_change: OnLink) -> Callable[[], None]:
        """Call `on_change` when the daemon is lost, while it stays so, and when it is back."""
        key = object()
        self._listeners[key] = on_change
        return lambda: self._listeners.pop(key, None) and None

    async def look_again(self, path: str) -> None:
        """Read what a page shows without waiting for its next turn: something was just changed."""
        if (feed := self._feeds.get(path)) is not None:
            await feed.look()

    def forget(self, feed: Feed[Any]) -> None:
        if self._feeds.get(feed.path) is feed:
            del self._feeds[feed.path]

    async def get(self, path: str, answer: type[AnswerT]) -> AnswerT:
        return await self.request("GET", path, answer)

    async def request(
        self,
        method: str,
        path: str,
        answer: type[AnswerT],
        payload: BaseModel | None = None,
        *,
        token: str | None = None,
        timeout_s: float = _TIMEOUT_SECONDS,
    ) -> AnswerT:
        """Ask the daemon, with this process' token or another. `DaemonTrouble`."""
        try:
            url = self._find_url()
            used = self._find_token() if token is None else token
            headers = {"authorization": f"Bearer {used}"} if used else {}
            content = None if payload is None else payload.model_dump(mode="json")
            reply = await self._http().request(
                method, url + path, json=content, headers=headers, timeout=timeout_s
            )
        except (NoDaemon, httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            text = str(error) or type(error).__name__
            self._set_lost(text)
            raise DaemonTrouble(text) from None
        if reply.status_code == httpx.codes.UNAUTHORIZED and token is None:
            text = f"it refuses the token; set OPERATOR_TOKEN, or put it into DATA_DIR/{self._token_file}"
            self._set_lost(text)
            raise DaemonTrouble(text, reply.status_code)
        self._set_back()
        return _content(reply, answer)

    async def close(self) -> None:
        for feed in list(self._feeds.values()):
            feed._stop()
        if self._client is not None:
            await self._client.aclose()

    def _http(self) -> httpx.AsyncClient:
        if self._client is None:
            # Without the environment's proxies and without redirects: every request carries the token.
            self._client = httpx.AsyncClient(trust_env=False, limits=httpx.Limits(max_connections=8))
        return self._client

    def _set_lost(self, text: str) -> None:
        if self.lost_at is None:
            self.lost_at = time.time()
        self.trouble = text
        self._tell()

    def _set_back(self) -> None:
        if self.lost_at is not None:
            self.lost_at, self.trouble = None, ""
            self._tell()

    def _tell(self) -> None:
        for on_change in list(self._listeners.values()):
            try:
                on_change(self)
            except Exception:  # as above
                log.exception("a page cannot show the state of %s", self.name)


def _content(reply: httpx.Response, answer: type[AnswerT]) -> AnswerT:
    if reply.is_success:
        try:
            return answer.model_validate_json(reply.content)
        except ValidationError:
            text = "its answer cannot be read; is it of this version?"
            raise DaemonTrouble(text, reply.status_code) from None
    try:
        message = reply.json()["message"]
    except (ValueError, KeyError, TypeError):
        message = f"it answered {reply.status_code}"
    raise DaemonTrouble(str(message), reply.status_code)


def build_links(settings: Settings) -> list[DaemonLink]:
    """The daemons of DASHBOARD_DAEMONS, or this machine's own."""
    if not settings.dashboard_daemons:
        return [DaemonLink("this machine", lambda: operator_url(settings), lambda: _own_token(settings))]
    return [_remote(settings, text) for text in settings.dashboard_daemons]


def _remote(settings: Settings, text: str) -> DaemonLink:
    name, _, url = text.partition("=")
    token_file = f"{TOKEN_FILE}-{name}"

    def token() -> str:
        try:
            return (settings.data_dir / token_file).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return _own_token(settings)

    return DaemonLink(name, lambda: url, token, token_file)


def _own_token(settings: Settings) -> str:
    own = settings.operator_token
    return own.get_secret_value() if own else stored_operator_token(settings.data_dir)


def link_named(links: Iterable[DaemonLink], name: str | None) -> DaemonLink:
    """The one with this name, else the first."""
    known = list(links)
    return next((link for link in known if link.name == name), known[0])
