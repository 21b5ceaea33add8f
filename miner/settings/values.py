"""The kinds of value that a setting can have, each with the rule that is shown for a wrong one.

A rule's text never repeats the value: `load.py` adds it, and knows which values are secret.
"""

from __future__ import annotations

import ipaddress
import re
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr
from pydantic_settings import NoDecode

from core.domain.hardware import GPU_KINDS, UnknownGpu, parse_gpus
from core.domain.tasks import OFFERED_TASKS, TaskType
from miner.support.addresses import public_key

MAX_REQUESTED_DATASETS = 2
#: Values of GPUS that ask the driver.
GPU_WORDS = ("auto", "nvml")
#: Shorter secrets cannot be kept out of the logs: hiding them would blank every second word.
MIN_SECRET_LENGTH = 4
MIN_TOKEN_LENGTH = 16
MIN_PASSWORD_LENGTH = 12
HUGGINGFACE = "huggingface"
REPORT_PERIODS = ("daily", "weekly", "monthly")

_GITHUB_REPO = re.compile(r"https://github\.com/[A-Za-z0-9][A-Za-z0-9-]{0,38}/[A-Za-z0-9._-]{1,100}")
_HUB_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?")
_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
_ULIMITS = ("core", "data", "fsize", "memlock", "nofile", "rtprio", "sigpending", "stack")

#: What an operator may write for a task type, besides the validator's spelling.
_TASK_NAMES = {name.lower(): kind for kind in OFFERED_TASKS for name in (kind.name, kind.value)}


# Text


def matches(pattern: str, rule: str) -> AfterValidator:
    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(rule)
        return value

    return AfterValidator(check)


def _min_length(length: int, advice: str) -> AfterValidator:
    def check(value: SecretStr) -> SecretStr:
        if len(value.get_secret_value()) < length:
            raise ValueError(f"must have at least {length} characters{advice}")
        return value

    return AfterValidator(check)


def _absolute(value: Path) -> Path:
    try:
        return value.expanduser().absolute()
    except RuntimeError:
        raise ValueError("begins with ~ but there is no home directory to put there; write it out") from None


def _gpus(value: str) -> str:
    if value not in GPU_WORDS:
        try:
            parse_gpus(value)
        except UnknownGpu:
            raise ValueError(
                "must be auto, nvml, cpu, or the GPUs there are, written like 4xH100; "
                f"known are {', '.join(GPU_KINDS)}"
            ) from None
    return value


FileName = Annotated[
    str,
    matches(
        r"[A-Za-z0-9_][A-Za-z0-9._@+-]{0,127}",
        "must be a plain file name: letters, digits and . _ @ + -, no slash",
    ),
]
ImageName = Annotated[
    str,
    matches(
        r"(?=.{1,400}$)(sha256:)?[a-zA-Z0-9][a-zA-Z0-9._/:-]*(@sha256:[0-9a-f]{64})?",
        "must be an image's name, such as god-miner/text-trainer:latest, or its sha256:… id",
    ),
]
Secret = Annotated[SecretStr, _min_length(MIN_SECRET_LENGTH, ": less cannot be kept out of the logs")]
Token = Annotated[SecretStr, _min_length(MIN_TOKEN_LENGTH, "; `openssl rand -hex 24` prints a good one")]
Password = Annotated[
    SecretStr, _min_length(MIN_PASSWORD_LENGTH, "; `openssl rand -base64 18` prints a good one")
]
AbsolutePath = Annotated[Path, AfterValidator(_absolute)]
Gpus = Annotated[str, AfterValidator(_gpus)]
Port = Annotated[int, Field(ge=0, le=65535)]
#: In dollars.
Price = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, le=7 * 86_400, allow_inf_nan=False)]


# Addresses


def is_loopback(host: str) -> bool:
    """Return True if only this machine can reach a server on `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_address(value: str, *schemes: str, bare: bool = False) -> bool:
    """Return True if it names a host under one of the schemes; `bare` allows no user, query or fragment."""
    try:
        parts = urlsplit(value)
        more = (parts.username, parts.password, parts.query, parts.fragment) if bare else ()
        return parts.scheme in schemes and bool(parts.hostname) and parts.port != 0 and not any(more)
    except ValueError:
        return False


def _site_url(value: str) -> str:
    if not _is_address(value, "http", "https", bare=True):
        raise ValueError(
            "must be the address of a site, such as https://huggingface.co, without a user in it"
        )
    return value.rstrip("/")


def _websocket(value: str) -> str:
    if not _is_address(value, "ws", "wss"):
        raise ValueError("must be a websocket address, such as wss://node.example.org:443")
    return value


def _network(value: Any) -> Any:
    try:
        return ipaddress.ip_network(value)
    except (ValueError, TypeError):
        raise ValueError("must be a network, such as 10.0.0.0/8 or fd00::/8, without host bits") from None


def _listen_host(value: str) -> str:
    try:
        return str(ipaddress.ip_address(value))
    except ValueError:
        pass
    if not _HOST.fullmatch(value) or re.fullmatch(r"[0-9.]+", value):
        raise ValueError("must be an address to listen on, such as 0.0.0.0, without http:// or port")
    return value


def _axon_ip(value: str) -> str:
    try:
        address = ipaddress.IPv4Address(value)
    except ValueError:
        raise ValueError("must be an IPv4 address: validators build http://IP:PORT from it") from None
    if address.is_unspecified or address.is_multicast or address == ipaddress.IPv4Address("255.255.255.255"):
        raise ValueError("must be the address of one machine, reachable from the internet")
    return str(address)


SiteUrl = Annotated[str, AfterValidator(_site_url)]
Websocket = Annotated[str, AfterValidator(_websocket)]
ListenHost = Annotated[str, AfterValidator(_listen_host)]
AxonIp = Annotated[str, AfterValidator(_axon_ip)]
DockerHost = Annotated[
    str,
    matches(r"unix:///[^\s\0]+", "must be a socket on this machine, such as unix:///var/run/docker.sock"),
]


# Repositories and the hub


def _commit(value: str) -> str:
    if not re.fullmatch(r"[0-9a-fA-F]{40}", value):
        raise ValueError(
            "must be a full commit of 40 hexadecimal digits, not a branch, a tag or a shortened one: "
            "validators refuse those; `git rev-parse HEAD` prints it"
        )
    return value.lower()


def _github_url(value: str) -> str:
    trimmed = value.rstrip("/").removesuffix(".git")
    if not _GITHUB_REPO.fullmatch(trimmed) or trimmed.endswith(("/.", "/..")):
        raise ValueError(
            "must look like https://github.com/owner/name, without a user, token, branch or folder in it"
        )
    return trimmed


def _dataset(value: str) -> str:
    parts = value.split("/")
    if len(parts) > 2 or not all(_HUB_NAME.fullmatch(part) for part in parts):
        raise ValueError("must be a Hugging Face dataset, written owner/name")
    return value


def _at_most_two(value: tuple[str, ...]) -> tuple[str, ...]:
    if len(value) > MAX_REQUESTED_DATASETS:
        raise ValueError(f"must be at most {MAX_REQUESTED_DATASETS} datasets: validators ignore the rest")
    return value


def _hub(value: str) -> str:
    kind, _, directory = value.partition(":")
    if value.lower() == HUGGINGFACE:
        return HUGGINGFACE
    if kind.lower() != "local" or not directory:
        raise ValueError(f"must be {HUGGINGFACE}, or local: and a directory, such as local:/srv/hub")
    return f"local:{_absolute(Path(directory))}"


def _hub_user(value: str) -> str:
    if not _HUB_NAME.fullmatch(value) or "--" in value or ".." in value:
        raise ValueError("must be the name of a Hugging Face user or organisation, without a slash")
    return value


Commit = Annotated[str, AfterValidator(_commit)]
GithubUrl = Annotated[str, AfterValidator(_github_url)]
Hub = Annotated[str, AfterValidator(_hub)]
HubUser = Annotated[str, AfterValidator(_hub_user)]


# Lists


def split_list(value: Any) -> Any:
    """Split a list at commas and blanks: nobody should have to write JSON in a shell."""
    if isinstance(value, str):
        return tuple(dict.fromkeys(part for part in re.split(r"[,\s]+", value) if part))
    return value


def _hotkey(value: str) -> str:
    if public_key(value) is None:
        raise ValueError("must be an ss58 address, such as 5GrwvaEF5zXb26Fz9rcQpDWS57CtERHpNehXCPcNoHGKutQY")
    return value


def _task_type(value: Any) -> Any:
    if isinstance(value, str) and not isinstance(value, TaskType):
        task_type = _TASK_NAMES.get(value.lower())
        if task_type is None:
            raise ValueError(f"must be among {', '.join(OFFERED_TASKS)}, or all left out")
        return task_type
    return value


def _report(value: str) -> str:
    if value.lower() not in REPORT_PERIODS:
        raise ValueError(f"must be among {', '.join(REPORT_PERIODS)}")
    return value.lower()


def _ulimits(value: tuple[str, ...]) -> tuple[str, ...]:
    for limit in value:
        name, _, number = limit.partition("=")
        if name not in _ULIMITS or not re.fullmatch(r"-1|\d{1,18}", number):
            raise ValueError(f"must be written like memlock=-1, and the name be among {', '.join(_ULIMITS)}")
    return value


def _host_name(value: str) -> str:
    if not _HOST.fullmatch(value):
        raise ValueError("must be the name of a host, such as miner.example.org, without https:// or port")
    return value.lower()


def _daemon_url(value: str) -> str:
    name, _, url = value.partition("=")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}", name) or not _is_address(
        url, "http", "https", bare=True
    ):
        raise ValueError("must be written NAME=URL, such as rack1=http://127.0.0.1:7998")
    if url.startswith("http:") and not is_loopback(urlsplit(url).hostname or ""):
        raise ValueError(
            "must begin with https:// for another machine, because the operator's token travels to it; "
            "`ssh -L` makes its port a port of this machine"
        )
    return value.rstrip("/")


HostName = Annotated[str, AfterValidator(_host_name)]
HostNames = Annotated[tuple[HostName, ...], NoDecode, BeforeValidator(split_list)]
DaemonUrl = Annotated[str, AfterValidator(_daemon_url)]
DaemonUrls = Annotated[tuple[DaemonUrl, ...], NoDecode, BeforeValidator(split_list)]


def _split_targets(value: Any) -> Any:
    """Split at blanks, and at commas before another target: a target may have commas in it."""
    if isinstance(value, str):
        parts = re.split(r"\s+|,(?=[A-Za-z][A-Za-z0-9]*://)", value)
        return tuple(dict.fromkeys(part.strip(",") for part in parts if part.strip(",")))
    return value


def _notify_url(value: SecretStr) -> SecretStr:
    if not re.match(r"[A-Za-z][A-Za-z0-9]*://\S", value.get_secret_value()):
        raise ValueError(
            "must be addresses as Apprise has them, such as tgram://TOKEN/CHAT or mailto://user:password@host"
        )
    return value


NotifyUrls = Annotated[
    tuple[Annotated[SecretStr, AfterValidator(_notify_url)], ...], NoDecode, BeforeValidator(_split_targets)
]


class BackendKind(StrEnum):
    """The words of BACKEND. Each backend is the folder `miner/backends/NAME`."""

    AUTO = "auto"
    DOCKER = "docker"
    PROCESS = "process"
    #: A backend that finds GPUs on machines of its own.
    SLURM = "slurm", "cluster"
    NONE = "none"

    is_cluster: bool

    def __new__(cls, word: str, where: str = "") -> Self:
        kind = str.__new__(cls, word)
        kind._value_ = word
        kind.is_cluster = where == "cluster"
        return kind

    @property
    def is_backend(self) -> bool:
        return self not in (BackendKind.AUTO, BackendKind.NONE)


def _one_per_machine(kinds: tuple[BackendKind, ...]) -> tuple[BackendKind, ...]:
    here = [kind for kind in kinds if not kind.is_cluster]
    nothing_else = BackendKind.NONE not in kinds or len(kinds) == 1
    if (
        not kinds
        or len(here) > 1
        or len(kinds) - len(here) > 1
        or len(set(kinds)) < len(kinds)
        or not nothing_else
    ):
        local = ", ".join(kind for kind in BackendKind if not kind.is_cluster)
        clusters = ", ".join(kind for kind in BackendKind if kind.is_cluster)
        raise ValueError(f"must be one of {local}, or {clusters}, or both, like docker,slurm")
    return kinds


BackendKinds = Annotated[
    tuple[BackendKind, ...], NoDecode, BeforeValidator(split_list), AfterValidator(_one_per_machine)
]

Hotkey = Annotated[str, AfterValidator(_hotkey)]
Hotkeys = Annotated[tuple[Hotkey, ...], NoDecode, BeforeValidator(split_list)]
Network = Annotated[ipaddress.IPv4Network | ipaddress.IPv6Network, BeforeValidator(_network)]
Networks = Annotated[tuple[Network, ...], NoDecode, BeforeValidator(split_list)]
OneTaskType = Annotated[TaskType, BeforeValidator(_task_type)]
TaskTypes = Annotated[tuple[OneTaskType, ...], NoDecode, BeforeValidator(split_list)]
Dataset = Annotated[str, AfterValidator(_dataset)]
Reports = Annotated[
    tuple[Annotated[str, AfterValidator(_report)], ...], NoDecode, BeforeValidator(split_list)
]
Datasets = Annotated[tuple[Dataset, ...], NoDecode, BeforeValidator(split_list), AfterValidator(_at_most_two)]
Ulimits = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_list), AfterValidator(_ulimits)]
