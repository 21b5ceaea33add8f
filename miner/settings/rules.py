"""The rules that bind several settings together."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from miner.fiber import public_key
from miner.settings.values import is_loopback

if TYPE_CHECKING:
    from miner.settings.fields import Settings

TOURNAMENTS = ("text", "image", "environment")


@dataclass(frozen=True)
class Broken:
    """A rule that does not hold. The first field is the one to name; the rule was judged on all of them."""

    fields: tuple[str, ...]
    text: str


def broken(settings: Settings) -> tuple[Broken, ...]:
    """Every rule that does not hold."""
    return (
        *_operator_port_is_guarded(settings),
        *_ports_differ(settings),
        *_published_address_is_reachable(settings),
        *_hotkeys_are_allowed_or_denied(settings),
        *_limits_are_in_order(settings),
        *_repositories_are_whole(settings),
        *_hub_token_travels_covered(settings),
    )


def _operator_port_is_guarded(settings: Settings) -> Iterator[Broken]:
    if settings.operator_token is None and not is_loopback(settings.operator_host):
        yield Broken(
            ("operator_token", "operator_host"),
            f"must be set, because OPERATOR_HOST={settings.operator_host} is reachable from other machines; "
            "or set OPERATOR_HOST=127.0.0.1",
        )


def _ports_differ(settings: Settings) -> Iterator[Broken]:
    if settings.public_port == settings.operator_port != 0:
        yield Broken(
            ("operator_port", "public_port"),
            f"must differ from PUBLIC_PORT={settings.public_port}: one port can not serve both",
        )


def _published_address_is_reachable(settings: Settings) -> Iterator[Broken]:
    if settings.chain != "bittensor":
        return
    ip = settings.public_ip
    if ip and not settings.allow_private_axon and not ipaddress.ip_address(ip).is_global:
        yield Broken(
            ("public_ip", "allow_private_axon", "chain"),
            "is not reachable from the internet; set the public address, or ALLOW_PRIVATE_AXON=true "
            "on a chain of your own",
        )
    if settings.axon_port == 0:
        yield Broken(
            ("public_port", "published_port", "chain"),
            "must be a fixed port with CHAIN=bittensor: validators read it from the chain",
        )


def _hotkeys_are_allowed_or_denied(settings: Settings) -> Iterator[Broken]:
    denied = {public_key(hotkey) for hotkey in settings.deny_hotkeys}
    for hotkey in settings.allow_hotkeys:
        if public_key(hotkey) in denied:
            yield Broken(
                ("allow_hotkeys", "deny_hotkeys"), f"{hotkey} is in DENY_HOTKEYS too; drop one of them"
            )


def _limits_are_in_order(settings: Settings) -> Iterator[Broken]:
    if settings.max_concurrent_requests > settings.max_connections:
        yield Broken(
            ("max_concurrent_requests", "max_connections"),
            f"can not be more than MAX_CONNECTIONS={settings.max_connections}",
        )
    if settings.metagraph_stale_seconds <= settings.metagraph_refresh_seconds:
        yield Broken(
            ("metagraph_stale_seconds", "metagraph_refresh_seconds"),
            f"must be more than METAGRAPH_REFRESH_SECONDS={settings.metagraph_refresh_seconds:g}, "
            "or every copy is stale",
        )


def _repositories_are_whole(settings: Settings) -> Iterator[Broken]:
    for kind in TOURNAMENTS:
        prefix = f"training_repo_{kind}"
        url, commit, token, datasets = (f"{prefix}_{part}" for part in ("url", "commit", "token", "datasets"))
        has_url, has_commit = bool(getattr(settings, url)), bool(getattr(settings, commit))
        if has_url and not has_commit:
            yield Broken(
                (commit, url), f"must be set, because {url.upper()} is; `git rev-parse HEAD` prints it"
            )
        if has_commit and not has_url:
            yield Broken((url, commit), f"must be set, because {commit.upper()} is; or clear that one")
        for extra in (token, datasets):
            if getattr(settings, extra) and not has_url and not has_commit:
                yield Broken((extra, url, commit), f"does nothing without {url.upper()} and {commit.upper()}")


def _hub_token_travels_covered(settings: Settings) -> Iterator[Broken]:
    parts = urlsplit(settings.hf_endpoint)
    if settings.hf_token and parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        yield Broken(
            ("hf_endpoint", "hf_token"), "must begin with https://, because HF_TOKEN would travel in the open"
        )
