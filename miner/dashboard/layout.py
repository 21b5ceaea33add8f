"""The frame of every page: header, daemon, navigation, theme; and the view that a page works with.

A page is a module in `miner/dashboard/pages`, which is found there without being listed:

    @page("/offers", "Offers", place=30)           # a place in the navigation, or None
    def offers_page(view: PageView, q: str = "") -> None:   # further arguments are of the path or the query
        with panel("Offers"):
            rows = Table("Offers", [Column("Model", "model")], key=attrgetter("id"))
            nothing = empty("No offer has come yet: `god-miner doctor` says whether validators reach you.")

        def show(answer: OfferList) -> None:
            set_visible(nothing, rows.show(answer.offers) == 0)

        view.live(f"/offers?limit=50&q={quote(q)}", OfferList, show)

- Build everything once, change it in `show`: the parts of `parts.py` send only what changed. `view.live`
  polls once for all open pages, says by itself what is wrong (an error of the daemon, a route it does not
  have), and goes on after the daemon was away. `await view.get(path, OfferList)` asks once, in handlers,
  and raises `DaemonTrouble`. Answers are the records of `miner/api`.
- What changes something goes through `await view.act("POST", path, Record, payload, Question(…))`: it asks
  for a confirmation and, once per browser session, for the operator's token. None: given up.
- Links: `view.href("/jobs/3")`, so that the chosen daemon stays chosen.
- Charts: `charts.py`. Styles: `static/page.css`; colours by its variables only, never by value. No Tailwind.
- Texts from a daemon are shown by `Text`, `Table` and `ui.label` only, never by `ui.html` or `ui.markdown`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic
from urllib.parse import quote, urlencode

from nicegui import Client, ui
from nicegui.element import Element
from pydantic import BaseModel

from miner.api.base import Answer
from miner.dashboard.daemons import AnswerT, DaemonLink, DaemonTrouble, OnLink, link_named
from miner.dashboard.guard import SESSION_KEY, BrowserSession
from miner.dashboard.parts import Text, ago, box, clock, set_stale, set_visible

log = logging.getLogger(__name__)

#: Most pages that wait for their browser to connect. A page takes megabytes here, and a client that is no
#: browser never connects. A browser whose page is gone opens it again.
MAX_UNCONNECTED = 8

_THEME_COOKIE = "god-miner-theme"
_THEMES: dict[str, bool | None] = {"auto": None, "light": False, "dark": True}


@dataclass(frozen=True)
class PageEntry:
    path: str
    title: str
    #: From left to right in the navigation, or None if it is not there.
    place: int | None


_pages: list[PageEntry] = []
_links: list[DaemonLink] = []
_needs_login = False
#: Pages whose browser has not connected yet, the oldest first.
_unconnected: dict[Client, None] = {}


def install(links: Sequence[DaemonLink], *, needs_login: bool) -> None:
    """Give the pages their daemons."""
    global _needs_login
    _links[:] = links
    _needs_login = needs_login
    ui.add_head_html('<link rel="stylesheet" href="/static/page.css">', shared=True)


@dataclass(frozen=True)
class Question:
    """A confirmation that is asked before something is changed."""

    title: str
    button: str
    text: str = ""
    danger: bool = False


class PageView:
    """One open page: its daemon, its browser session, and how it reads and acts."""

    def __init__(self, client: Client, link: DaemonLink, session: BrowserSession | None) -> None:
        self.client, self.link, self.session = client, link, session

    @property
    def links(self) -> Sequence[DaemonLink]:
        return _links

    def href(self, path: str, **query: Any) -> str:
        """A page's address, with the chosen daemon."""
        known = {name: value for name, value in query.items() if value not in (None, "")}
        if self.link is not _links[0]:
            known["daemon"] = self.link.name
        return f"{path}?{urlencode(known, quote_via=quote)}" if known else path

    def live(
        self,
        path: str,
        answer: type[AnswerT],
        show: Callable[[AnswerT], None],
        *,
        every: float = 2.0,
        link: DaemonLink | None = None,
    ) -> Callable[[], None]:
        """Show the answer to GET `path`, now and from then on, as long as the page is open or until the
        function that is returned is called. Troubles are shown here, where this is called."""
        note = Text("", "hidden", "p").props('role="status"')

        def show_data(data: AnswerT) -> None:
            if not self.client.is_deleted:
                with self.client:
                    show(data)

        def show_trouble(trouble: DaemonTrouble | None) -> None:
            # That the daemon does not answer is shown once, at the top.
            is_told = trouble is not None and trouble.status is not None
            if not self.client.is_deleted and (is_told or note.text):
                # That something is not there yet is no mishap.
                is_missing = trouble is not None and trouble.status == 404
                note.show(f"The daemon says: {trouble}" if is_told else "")
                note.classes(add="empty" if is_missing else "trouble", remove="empty trouble")
                set_visible(note, is_told)

        stop = (link or self.link).watch(path, answer, every, show_data, show_trouble)
        self.client.on_delete(stop)
        return stop

    def follow(self, show: OnLink, link: DaemonLink | None = None) -> None:
        """Call `show` at once, while the daemon does not answer, and when it answers again."""
        followed = link or self.link

        def show_link(one: DaemonLink) -> None:
            if not self.client.is_deleted:
                show(one)

        show_link(followed)
        self.client.on_delete(followed.listen(show_link))

    async def get(self, path: str, answer: type[AnswerT]) -> AnswerT:
        """Ask once. `DaemonTrouble`."""
        return await self.link.get(path, answer)

    def explain(self, trouble: DaemonTrouble, path: str) -> None:
        """Say why a page that asks once cannot be shown. Where the daemon is away, which the banner says,
        open the page again as soon as GET `path` is answered."""
        if trouble.status is not None:
            Text(f"The daemon says: {trouble}", "trouble", "p").props('role="alert"')
            return
        Text("This page is opened again as soon as the daemon answers.", "empty", "p")
        self.live(path, Answer, lambda _: ui.navigate.reload())

    async def act(
        self,
        method: str,
        path: str,
        answer: type[AnswerT],
        question: Question,
        payload: BaseModel | None = None,
    ) -> AnswerT | None:
        """Change something on the daemon, with the token that the operator types and after a confirmation.
        Return its answer, or None if it was given up; a refusal is shown in the dialog."""
        if self.session is None or self.session.is_over:
            ui.notify("Reload the page: it has no browser session, or an old one.", type="warning")
            return None
        dialog = _QuestionDialog(self, partial(self.link.request, method, path, answer, payload))
        return await dialog.ask(question)


class _QuestionDialog(Generic[AnswerT]):
    """The dialog of one action. `send` sends it with a token."""

    def __init__(self, view: PageView, send: Callable[..., Awaitable[AnswerT]]) -> None:
        self._view, self._request = view, send

    async def ask(self, question: Question) -> AnswerT | None:
        view = self._view
        with view.client, ui.dialog() as dialog, ui.card().classes("ask"):
            Text(question.title, tag="h2").classes("strong").style("color:var(--ink);font-size:15px")
            if question.text:
                Text(question.text, "muted", "p")
            self._token = (
                ui.input("Operator token", password=True)
                .props('outlined dense autocomplete="off" autofocus')
                .on("keydown.enter", lambda: self._send(dialog))
            )
            self._hint = Text(
                "It is in DATA_DIR/operator-token on the daemon's machine, or what OPERATOR_TOKEN is set to. "
                "It is asked for once per browser session.",
                "small muted",
                "p",
            )
            self._problem = Text("", "trouble hidden", "p").props('role="alert"')
            with box("row").style("justify-content:flex-end"):
                ui.button("Leave it", color=None, on_click=lambda: dialog.submit(None)).props(
                    "flat no-caps"
                ).classes("plain")
                ui.button(question.button, color=None, on_click=lambda: self._send(dialog)).props(
                    "flat no-caps"
                ).classes("plain danger" if question.danger else "plain primary")
        self._show_token_field()
        dialog.on("hide", dialog.delete)
        answer: AnswerT | None = await dialog
        return answer

    def _show_token_field(self) -> None:
        assert self._view.session is not None
        missing = self._view.link.name not in self._view.session.tokens
        set_visible(self._token, missing)
        set_visible(self._hint, missing)

    async def _send(self, dialog: ui.dialog) -> None:
        session, link = self._view.session, self._view.link
        assert session is not None
        token = session.tokens.get(link.name) or str(self._token.value or "").strip()
        if not token:
            self._tell("Type the operator's token.")
            return
        try:
            answer = await self._request(token=token)
        except DaemonTrouble as error:
            if error.status == 401:
                session.tokens.pop(link.name, None)
                self._show_token_field()
                self._tell("That is not the daemon's token.")
                return
            if error.status is not None and error.status != 429:
                self._remember(token)
            self._tell(str(error))
            return
        self._remember(token)
        dialog.submit(answer)

    def _remember(self, token: str) -> None:
        """Keep it here; in the browser nothing of it stays."""
        assert self._view.session is not None
        self._view.session.tokens[self._view.link.name] = token
        self._token.value = ""
        self._show_token_field()

    def _tell(self, problem: str) -> None:
        self._problem.show(problem)
        set_visible(self._problem, True)


def page(
    path: str, title: str, place: int | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a page; the docstring of this module says how one is written."""
    entry = PageEntry(path, title, place)

    def register(build: Callable[..., Any]) -> Callable[..., Any]:
        _pages.append(entry)

        async def open_page(**arguments: Any) -> None:
            client = ui.context.client
            _limit_unconnected(client)
            link = link_named(_links, client.request.query_params.get("daemon"))
            view = PageView(client, link, client.request.scope.get(SESSION_KEY))
            with _frame(view, entry):
                built = build(view, **arguments)
                if inspect.isawaitable(built):
                    await built

        # What remains are the arguments of path and query, which FastAPI reads from here.
        signature = inspect.signature(build, eval_str=True)
        open_page.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=list(signature.parameters.values())[1:], return_annotation=None
        )
        open_page.__name__ = build.__name__
        ui.page(path, title=f"{title} · god-miner", response_timeout=10)(open_page)
        return build

    return register


def _limit_unconnected(client: Client) -> None:
    """Add a page that no browser has connected to yet; delete the oldest beyond the limit."""
    while len(_unconnected) >= MAX_UNCONNECTED:
        oldest = next(iter(_unconnected))
        del _unconnected[oldest]
        oldest.delete()
    _unconnected[client] = None

    def forget() -> None:
        _unconnected.pop(client, None)

    client.on_connect(forget)
    client.on_delete(forget)


def page_head(title: str) -> tuple[Text, Element]:
    """The page's heading, and the place for buttons at its end."""
    with box("page-head"):
        heading = Text(title, tag="h1")
        return heading, box("end")


def _frame(view: PageView, entry: PageEntry) -> Element:
    """Build header, banner and navigation; return what the page goes into."""
    theme = _theme_of(view)
    dark = ui.dark_mode(_THEMES[theme])
    with box("top", "header"):
        with box("top-row"):
            Text("god-miner", "brand")
            with box("nav", "nav").props('aria-label="Pages"'):
                for one in sorted((p for p in _pages if p.place is not None), key=lambda p: p.place or 0):
                    here = one.path == entry.path or (
                        one.path != "/" and entry.path.startswith(one.path + "/")
                    )
                    link = _nav_link(view, one)
                    if here:
                        link.props('aria-current="page"')
            with box("top-end"):
                _daemon_choice(view, entry)
                _theme_button(dark, theme)
                if _needs_login:
                    with box(tag="form").props('method="post" action="/logout"'):
                        Text("Log out", "plain", "button").props('type="submit"')
        _lost_banner(view)
    content = box("page", "main")
    view.follow(lambda link: set_stale(content, link.lost_at is not None))
    ui.skip_link(target=content)
    return content


def _nav_link(view: PageView, entry: PageEntry) -> Element:
    link = Text(entry.title, tag="a")
    link.props["href"] = view.href(entry.path)
    return link


def _daemon_choice(view: PageView, entry: PageEntry) -> None:
    if len(_links) == 1:
        return

    def choose(name: str) -> None:
        # A job's number means another job elsewhere.
        path = entry.path if "{" not in entry.path else "/"
        ui.navigate.to(path if name == _links[0].name else f"{path}?daemon={quote(name)}")

    ui.select(
        [link.name for link in _links],
        value=view.link.name,
        label="Daemon",
        on_change=lambda event: choose(event.value),
    ).props("outlined dense options-dense").style("min-width:130px")


def _theme_of(view: PageView) -> str:
    theme = view.client.request.cookies.get(_THEME_COOKIE, "auto")
    return theme if theme in _THEMES else "auto"


def _theme_button(dark: ui.dark_mode, theme: str) -> None:
    names = list(_THEMES)
    current = theme

    def turn() -> None:
        nonlocal current
        current = names[(names.index(current) + 1) % len(names)]
        dark.value = _THEMES[current]
        button.text = f"Theme: {current}"
        ui.run_javascript(
            f"document.cookie='{_THEME_COOKIE}={current};path=/;max-age=31536000;samesite=strict'"
        )

    button = ui.button(f"Theme: {theme}", color=None, on_click=turn).props("flat no-caps dense")
    button.classes("plain quiet")


def _lost_banner(view: PageView) -> None:
    """While the daemon does not answer: since when, and what to do."""
    with box("banner hidden").props('role="alert"') as banner, box():
        text = Text("")

    def show(link: DaemonLink) -> None:
        lost = link.lost_at is not None
        text.show(_lost_text(link) if lost else "")
        set_visible(banner, lost)

    view.follow(show)


def _lost_text(link: DaemonLink) -> str:
    return (
        f"The daemon ({link.name}) has been unreachable since {clock(link.lost_at)}, {ago(link.lost_at)}: "
        f"{link.trouble}. Values in grey are from before; the page goes on as soon as the daemon "
        "answers. `pm2 status`, "
        "`pm2 logs god-miner` and `god-miner doctor` say more."
    )
