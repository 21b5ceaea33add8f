"""All settings in one object, and the rules that bind several of them together.

`Settings(...)` itself reads nothing from outside: `load_settings` does.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar
from urllib.parse import unquote, urlsplit

from pydantic import PrivateAttr, SecretStr, model_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from core.domain.wire import TournamentType
from miner.observe.redact import HIDDEN
from miner.settings.fields import (
    AlertsSection,
    BackendSection,
    CallersSection,
    ChainKind,
    ChainSection,
    DashboardSection,
    FilesSection,
    GpusSection,
    HistorySection,
    HubSection,
    InputsSection,
    JobsSection,
    MoneySection,
    NotificationsSection,
    OffersSection,
    OperatorPortSection,
    PublicPortSection,
    RunningSection,
    Section,
    TournamentSection,
    WalletSection,
)
from miner.settings.values import MIN_SECRET_LENGTH, BackendKind, is_loopback
from miner.support.addresses import public_key

Source = Literal["default", "env", ".env", "override"]

#: A part of a chain node's path that is at least this long is taken for an access key.
MIN_KEY_LENGTH = 16


@dataclass(frozen=True)
class TrainingRepo:
    """Answer of `GET /training_repo/{task_type}` for one tournament type."""

    url: str
    commit: str
    token: SecretStr | None
    datasets: tuple[str, ...]


def backend_sections() -> Iterator[type[Section]]:
    """The sections that the backends bring along: SECTION of their `settings.py`."""
    for kind in BackendKind:
        module = f"miner.backends.{kind}.settings"
        if kind.is_backend and importlib.util.find_spec(module):
            yield importlib.import_module(module).SECTION


if TYPE_CHECKING:

    class BackendSettings(Section):
        """The fields of all of them."""
else:
    BackendSettings = type(
        "BackendSettings", tuple(reversed([*backend_sections()])), {"__module__": __name__}
    )

SectionT = TypeVar("SectionT", bound=Section)


class Settings(
    # pydantic takes the fields of the last base first: read upwards.
    RunningSection,
    NotificationsSection,
    TournamentSection,
    JobsSection,
    BackendSettings,
    BackendSection,
    InputsSection,
    HubSection,
    AlertsSection,
    HistorySection,
    MoneySection,
    GpusSection,
    OffersSection,
    DashboardSection,
    OperatorPortSection,
    PublicPortSection,
    CallersSection,
    WalletSection,
    ChainSection,
    FilesSection,
    BaseSettings,
):
    """All settings, checked. Build one with `load_settings`."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        str_strip_whitespace=True,
        validate_default=True,
        env_ignore_empty=True,
        defer_build=False,
    )

    _sources: dict[str, Source] = PrivateAttr(default_factory=dict)
    _warnings: tuple[str, ...] = PrivateAttr(default=())

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        *_others: PydanticBaseSettingsSource,
        **_more: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)

    @model_validator(mode="after")
    def check_rules(self) -> Self:
        broken = broken_rules(self)
        if broken:
            text = "; ".join(f"{rule.fields[0].upper()}: {rule.text}" for rule in broken)
            raise PydanticCustomError("broken_rules", "{text}", {"text": text, "broken": broken})
        return self

    @property
    def warnings(self) -> tuple[str, ...]:
        """Likely mistakes in `.env`, and settings that are gone."""
        return self._warnings

    @property
    def axon_port(self) -> int:
        """The port to publish on chain."""
        return self.published_port or self.public_port

    @property
    def backends(self) -> tuple[BackendKind, ...]:
        """The backends that run trainings; empty if nothing is trained."""
        return tuple(kind for kind in self.backend if kind is not BackendKind.NONE)

    @property
    def local_backend(self) -> BackendKind | None:
        """The backend of this machine's GPUs, or None if they are not used."""
        return next((kind for kind in self.backend if not kind.is_cluster), None)

    def section(self, kind: type[SectionT]) -> SectionT:
        """These settings with the fields of a backend's own section."""
        assert isinstance(self, kind)
        return self

    def source_of(self, name: str) -> Source:
        """Return the source of a field's value."""
        return self._sources.get(name, "default")

    def ulimits(self) -> dict[str, int]:
        """TRAINER_ULIMITS by name."""
        return {
            name: int(value) for name, _, value in (limit.partition("=") for limit in self.trainer_ulimits)
        }

    def training_repo(self, task_type: str) -> TrainingRepo | None:
        """Return what was entered for a tournament type (`text`, `image` or `environment`), if anything."""
        parts = ("url", "commit", "token", "datasets")
        url, commit, token, datasets = (
            getattr(self, f"training_repo_{task_type}_{part}", None) for part in parts
        )
        return TrainingRepo(url, commit, token, datasets or ()) if url and commit else None

    def secrets(self) -> Iterator[str]:
        """Yield every secret in plain text, for the log redactor and nothing else."""
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, SecretStr):
                yield value.get_secret_value()
        yield from keys_in(self.subtensor_address or "")
        for target in self.notify_urls:
            yield from _secrets_of_target(target.get_secret_value())

    def printable(self, name: str) -> Any:
        """Return a field's value as it may be printed."""
        value = getattr(self, name)
        if isinstance(value, SecretStr):
            return HIDDEN
        if name in SECRET_FIELDS and isinstance(value, tuple):
            return tuple(HIDDEN for _ in value)
        if name == "subtensor_address" and value:
            return without_keys(value)
        return value

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        yield from ((name, self.printable(name)) for name in type(self).model_fields)

    @classmethod
    def sections(cls) -> list[type[Section]]:
        """The sections, in the order of their fields."""
        return [
            base for base in reversed(cls.__mro__[1:]) if issubclass(base, Section) and "title" in vars(base)
        ]


#: Fields whose value is never printed.
SECRET_FIELDS = frozenset(
    name for name, field in Settings.model_fields.items() if "SecretStr" in str(field.annotation)
)


def keys_in(address: str) -> Iterator[str]:
    """Yield what is secret in a chain node's address: its password, and providers' keys in the path."""
    parts = urlsplit(address)
    keys = [parts.password or "", *re.split(r"[/?&=]", f"{parts.path}?{parts.query}")]
    for key in keys:
        if key == parts.password or len(key) >= MIN_KEY_LENGTH:
            yield from {key, unquote(key)}


def _secrets_of_target(url: str) -> Iterator[str]:
    """Yield what is secret in a notification target: all of it, and each long part, as every service has its
    tokens in another place."""
    yield url
    for part in re.split(r"[/?&=:@,#]+", url.partition("://")[2]):
        if len(part) >= MIN_KEY_LENGTH:
            yield from {part, unquote(part)}
    try:
        password = urlsplit(url).password or ""
    except ValueError:
        return
    if len(password) >= MIN_SECRET_LENGTH:
        yield from {password, unquote(password)}


def without_keys(address: str) -> str:
    """Return an address as it may be printed."""
    for key in keys_in(address):
        address = address.replace(key, HIDDEN)
    return address


@dataclass(frozen=True)
class BrokenRule:
    """A rule that does not hold. The first field is the one to name; the rule depends on all of them."""

    fields: tuple[str, ...]
    text: str


def broken_rules(settings: Settings) -> tuple[BrokenRule, ...]:
    """Return every rule that does not hold."""
    return (
        *_operator_port_has_a_token(settings),
        *_dashboard_has_a_password(settings),
        *_ports_differ(settings),
        *_published_address_is_reachable(settings),
        *_hotkeys_are_allowed_or_denied(settings),
        *_repositories_are_complete(settings),
        *_hub_token_is_encrypted(settings),
    )


def _operator_port_has_a_token(settings: Settings) -> Iterator[BrokenRule]:
    if settings.operator_token is None and not is_loopback(settings.operator_host):
        yield BrokenRule(
            ("operator_token", "operator_host"),
            f"must be set, because OPERATOR_HOST={settings.operator_host} is reachable from other machines; "
            "or set OPERATOR_HOST=127.0.0.1",
        )


def _dashboard_has_a_password(settings: Settings) -> Iterator[BrokenRule]:
    if settings.dashboard_password is not None:
        return
    if not is_loopback(settings.dashboard_host):
        yield BrokenRule(
            ("dashboard_password", "dashboard_host"),
            f"must be set, because DASHBOARD_HOST={settings.dashboard_host} is reachable from other "
            "machines; or set DASHBOARD_HOST=127.0.0.1",
        )
    elif settings.dashboard_names:
        yield BrokenRule(
            ("dashboard_password", "dashboard_names"),
            f"must be set, because a proxy offers the page as {settings.dashboard_names[0]}",
        )


def _ports_differ(settings: Settings) -> Iterator[BrokenRule]:
    if settings.public_port == settings.operator_port != 0:
        yield BrokenRule(
            ("operator_port", "public_port"),
            f"must differ from PUBLIC_PORT={settings.public_port}: one port cannot serve both",
        )
    for name in ("public_port", "operator_port"):
        if getattr(settings, name) == settings.dashboard_port != 0:
            yield BrokenRule(
                ("dashboard_port", name),
                f"must differ from {name.upper()}={settings.dashboard_port}: one port cannot serve both",
            )


def _published_address_is_reachable(settings: Settings) -> Iterator[BrokenRule]:
    if settings.chain is not ChainKind.BITTENSOR:
        return
    ip = settings.public_ip
    if ip and not settings.allow_private_axon and not ipaddress.ip_address(ip).is_global:
        yield BrokenRule(
            ("public_ip", "allow_private_axon", "chain"),
            "is not reachable from the internet; set the public address, or ALLOW_PRIVATE_AXON=true "
            "on a chain of your own",
        )
    if settings.axon_port == 0:
        yield BrokenRule(
            ("public_port", "published_port", "chain"),
            "must be a fixed port with CHAIN=bittensor: validators read it from the chain",
        )


def _hotkeys_are_allowed_or_denied(settings: Settings) -> Iterator[BrokenRule]:
    denied = {public_key(hotkey) for hotkey in settings.deny_hotkeys}
    for hotkey in settings.allow_hotkeys:
        if public_key(hotkey) in denied:
            yield BrokenRule(
                ("allow_hotkeys", "deny_hotkeys"), f"{hotkey} is in DENY_HOTKEYS too; drop one of them"
            )


def _repositories_are_complete(settings: Settings) -> Iterator[BrokenRule]:
    for kind in TournamentType:
        prefix = f"training_repo_{kind}"
        url, commit, token, datasets = (f"{prefix}_{part}" for part in ("url", "commit", "token", "datasets"))
        has_url, has_commit = bool(getattr(settings, url)), bool(getattr(settings, commit))
        if has_url and not has_commit:
            yield BrokenRule(
                (commit, url), f"must be set, because {url.upper()} is; `git rev-parse HEAD` prints it"
            )
        if has_commit and not has_url:
            yield BrokenRule((url, commit), f"must be set, because {commit.upper()} is; or clear that one")
        for extra in (token, datasets):
            if getattr(settings, extra) and not has_url and not has_commit:
                yield BrokenRule(
                    (extra, url, commit), f"does nothing without {url.upper()} and {commit.upper()}"
                )


def _hub_token_is_encrypted(settings: Settings) -> Iterator[BrokenRule]:
    parts = urlsplit(settings.hf_endpoint)
    if settings.hf_token and parts.scheme == "http" and not is_loopback(parts.hostname or ""):
        yield BrokenRule(
            ("hf_endpoint", "hf_token"), "must begin with https://, because HF_TOKEN would travel in the open"
        )
