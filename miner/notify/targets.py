"""The targets of NOTIFY_URLS: their names without secrets, and one delivery to them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from miner.notify.messages import (
    PROTOCOL,
    NotifyEvent,
    NotifyFailed,
    NotifyMessage,
    NotifyOrder,
    TargetOrder,
    TargetResult,
)
from miner.settings import Settings
from miner.support.subprocess import ChildSilent, run_order, worker_environment

log = logging.getLogger(__name__)

#: Time limit of one delivery to a target, and of the start of the process before it.
DELIVERY_SECONDS, START_SECONDS = 30.0, 30.0
#: Schemes with a host in the host's place. Others have a token there: `tgram://TOKEN/…`.
_SCHEMES_WITH_HOST = frozenset(
    {"json", "jsons", "xml", "xmls", "form", "forms", "mailto", "mailtos", "http", "https"}
)


def target_names(urls: Sequence[str]) -> list[str]:
    """Return names that may be shown: the scheme, and the host if it is not a secret. Equal names are
    numbered."""
    names: list[str] = []
    for url in urls:
        base = name = _target_name(url)
        number = 1
        while name in names:
            number += 1
            name = f"{base} ({number})"
        names.append(name)
    return names


def _target_name(url: str) -> str:
    scheme = url.partition("://")[0].lower()
    if scheme not in _SCHEMES_WITH_HOST:
        return scheme
    try:
        parts = urlsplit(url)
        port = f":{parts.port}" if parts.port else ""
        return f"{scheme}://{parts.hostname}{port}" if parts.hostname else scheme
    except ValueError:
        return scheme


@dataclass(frozen=True, slots=True)
class Delivery:
    """The messages that one target took."""

    target: str
    delivered: int
    #: Empty if it took all of them.
    error: str = ""


@dataclass
class NotifyTargets:
    """The targets, in the order of NOTIFY_URLS. `deliver` starts a process, which alone imports Apprise."""

    urls: tuple[str, ...]
    redact: Callable[[str], str]
    names: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.names = target_names(self.urls)

    @classmethod
    def from_settings(cls, settings: Settings, redact: Callable[[str], str]) -> NotifyTargets:
        return cls(tuple(url.get_secret_value() for url in settings.notify_urls), redact)

    def is_mail(self, number: int) -> bool:
        return self.urls[number].lower().startswith("mailto")

    async def deliver(
        self, messages: Mapping[int, Sequence[NotifyMessage]], seconds: float = DELIVERY_SECONDS
    ) -> dict[int, Delivery]:
        """Send each target its messages; return the results by the target's number. Never raises."""
        results: dict[int, TargetResult] = {}
        problem = f"no answer within {seconds:g} s"

        def on_event(event: NotifyEvent) -> None:
            nonlocal problem
            if isinstance(event, TargetResult):
                results[event.number] = event
            elif isinstance(event, NotifyFailed):
                problem = event.text

        orders = [
            TargetOrder(number=number, url=self.urls[number], messages=tuple(wanted))
            for number, wanted in messages.items()
        ]
        try:
            answer = await run_order(
                PROTOCOL,
                NotifyOrder(targets=tuple(orders), seconds=seconds),
                on_event,
                environment=worker_environment(),
                silence=seconds + START_SECONDS,
                redact=self.redact,
            )
            if answer.event is None:
                problem = f"the notification process {answer.ending}"
        except ChildSilent:
            pass
        except OSError as error:
            problem = f"the notification process cannot be started: {error}"
        return {number: self._delivery(number, results.get(number), problem) for number in messages}

    def _delivery(self, number: int, result: TargetResult | None, problem: str) -> Delivery:
        if result is None:
            return Delivery(self.names[number], 0, self.redact(problem))
        return Delivery(self.names[number], result.delivered, self.redact(result.error))
