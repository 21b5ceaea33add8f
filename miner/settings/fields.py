"""Every setting of the daemon: its variable is the upper-case name, its meaning stands beside it.

The environment wins over `.env`, which wins over the default; an empty variable counts as not set.
`Settings(...)` itself reads nothing from outside: `load_settings` does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import unquote, urlsplit

from pydantic import BeforeValidator, ByteSize, Field, PrivateAttr, SecretStr, model_validator
from pydantic.config import JsonDict
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from miner.redact import HIDDEN
from miner.settings import rules, values

Source = Literal["default", "env", ".env", "override"]

#: A part of a chain node's path that is at least this long is taken for an access key.
MIN_KEY_LENGTH = 16

#: POLICY and PROFILE that nobody chose: by the GPUs that there are.
AUTO = "auto"

_FILES: JsonDict = {"section": "Files"}
_CHAIN: JsonDict = {"section": "Chain"}
_WALLET: JsonDict = {"section": "Wallet"}
_CALLERS: JsonDict = {"section": "Who may call"}
_PUBLIC: JsonDict = {"section": "Public port"}
_OPERATOR: JsonDict = {"section": "Operator port"}
_LIMITS: JsonDict = {"section": "Limits"}
_OFFERS: JsonDict = {"section": "Offers"}
_HUB: JsonDict = {"section": "Hub"}
_INPUTS: JsonDict = {"section": "Inputs"}
_JOBS: JsonDict = {"section": "Jobs"}
_GPUS: JsonDict = {"section": "GPUs"}
_HISTORY: JsonDict = {"section": "History"}
_TOURNAMENT: JsonDict = {"section": "Tournament repositories"}
_TRAINING: JsonDict = {"section": "Training engine"}
_RUNNING: JsonDict = {"section": "Running"}


class ChainKind(StrEnum):
    FILE = "file"
    BITTENSOR = "bittensor"


class EngineKind(StrEnum):
    AUTO = "auto"
    DOCKER = "docker"
    PROCESS = "process"
    NONE = "none"


class SandboxKind(StrEnum):
    AUTO = "auto"
    OFF = "off"


class LogFormat(StrEnum):
    AUTO = "auto"
    CONSOLE = "console"
    JSON = "json"


LogLevel = Annotated[
    Literal["DEBUG", "INFO", "WARNING", "ERROR"],
    BeforeValidator(lambda value: value.upper() if isinstance(value, str) else value),
]


@dataclass(frozen=True)
class TrainingRepo:
    """What `GET /training_repo/{task_type}` answers for one tournament type."""

    url: str
    commit: str
    token: SecretStr | None
    datasets: tuple[str, ...]


class Settings(BaseSettings):
    """All settings, checked. Build one with `load_settings`."""

    model_config = SettingsConfigDict(
        extra="forbid", frozen=True, str_strip_whitespace=True, validate_default=True, env_ignore_empty=True
    )

    # Files
    data_dir: values.AbsolutePath = Field(
        default=Path(".god-miner"),
        description="Where the daemon keeps its database and files. One daemon per directory.",
        json_schema_extra=_FILES,
    )

    # Chain
    netuid: int = Field(default=56, ge=0, le=65535, description="The subnet.", json_schema_extra=_CHAIN)
    chain: ChainKind = Field(
        default=ChainKind.FILE,
        description="Where hotkeys and stakes come from: `bittensor`, or `file` for NODES_FILE (no network).",
        json_schema_extra=_CHAIN,
    )
    subtensor_network: Literal["finney", "test", "archive", "devnet", "local"] = Field(
        default="finney", description="The chain's network by name.", json_schema_extra=_CHAIN
    )
    subtensor_address: values.Websocket | None = Field(
        default=None,
        description="A chain node of your own, ws:// or wss://; takes the place of SUBTENSOR_NETWORK.",
        json_schema_extra=_CHAIN,
    )
    chain_timeout_seconds: values.Seconds = Field(
        default=30, description="The longest that one call to the chain may take.", json_schema_extra=_CHAIN
    )
    metagraph_refresh_seconds: values.Seconds = Field(
        default=300, description="How often hotkeys and stakes are read anew.", json_schema_extra=_CHAIN
    )
    metagraph_stale_seconds: values.Seconds = Field(
        default=3600,
        description="From this age on, the last good copy of hotkeys and stakes counts as stale (an alert).",
        json_schema_extra=_CHAIN,
    )
    nodes_file: values.AbsolutePath = Field(
        default_factory=lambda data: data["data_dir"] / "nodes.json",
        description="The nodes of the subnet as JSON, for CHAIN=file; read again when it changes.",
        json_schema_extra={**_CHAIN, "default_text": "DATA_DIR/nodes.json"},
    )

    # Wallet
    wallet_name: values.FileName = Field(
        default="default", description="The wallet's name.", json_schema_extra=_WALLET
    )
    hotkey_name: values.FileName = Field(
        default="default",
        description="The hotkey in that wallet that this miner answers as.",
        json_schema_extra=_WALLET,
    )
    wallet_path: values.AbsolutePath = Field(
        default=Path("~/.bittensor/wallets"), description="Where wallets are kept.", json_schema_extra=_WALLET
    )
    wallet_password: values.Secret | None = Field(
        default=None,
        description="Opens an encrypted hotkey. Not asked for interactively: a daemon has nobody to ask.",
        json_schema_extra=_WALLET,
    )

    # Who may call
    min_stake_threshold: float = Field(
        default=1000.0,
        ge=0,
        allow_inf_nan=False,
        description="Callers with less stake are refused. 0 on a test network.",
        json_schema_extra=_CALLERS,
    )
    require_validator_permit: bool = Field(
        default=True,
        description="Refuse callers without a validator permit: stake alone is cheap, and whoever is let in "
        "may start tasks and read TRAINING_REPO_*_TOKEN.",
        json_schema_extra=_CALLERS,
    )
    allow_hotkeys: values.Hotkeys = Field(
        default=(),
        description="If set, only these hotkeys may call.",
        json_schema_extra=_CALLERS,
    )
    deny_hotkeys: values.Hotkeys = Field(
        default=(), description="These hotkeys may never call.", json_schema_extra=_CALLERS
    )

    # Public port
    public_host: values.ListenHost = Field(
        default="0.0.0.0",  # noqa: S104 - validators come from the internet
        description="The address to listen on for validators.",
        json_schema_extra=_PUBLIC,
    )
    public_port: values.Port = Field(
        default=7999,
        description="The port to listen on for validators (0: any free one).",
        json_schema_extra=_PUBLIC,
    )
    public_ip: values.AxonIp | None = Field(
        default=None,
        description="The IPv4 address published on chain, where validators find this miner.",
        json_schema_extra=_PUBLIC,
    )
    published_port: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        default=None,
        description="The port published on chain, where a port mapping makes it differ from PUBLIC_PORT.",
        json_schema_extra={**_PUBLIC, "default_text": "PUBLIC_PORT"},
    )
    allow_private_axon: bool = Field(
        default=False,
        description="Let a private PUBLIC_IP be published (a chain of your own).",
        json_schema_extra=_PUBLIC,
    )

    # Operator port
    operator_host: values.ListenHost = Field(
        default="127.0.0.1",
        description="The address to listen on for the operator: metrics and status.",
        json_schema_extra=_OPERATOR,
    )
    operator_port: values.Port = Field(
        default=7998,
        description="The port to listen on for the operator (0: any free one).",
        json_schema_extra=_OPERATOR,
    )
    operator_token: values.Token | None = Field(
        default=None,
        description="Bearer token of the operator port. Unset: one is made at the first start, in the file "
        "operator-token of DATA_DIR, where only the daemon's user can read it. Required when "
        "OPERATOR_HOST is not loopback.",
        json_schema_extra=_OPERATOR,
    )

    # Limits
    max_body_bytes: Annotated[ByteSize, Field(ge=1024, le=1024**3)] = Field(
        default=ByteSize(4 * 1024**2),
        description="The largest request body, as bytes or with a unit: 4MiB, 4MB.",
        json_schema_extra={**_LIMITS, "default_text": "4MiB"},
    )
    header_timeout_seconds: values.Seconds = Field(
        default=5, description="How long a caller may take to send its headers.", json_schema_extra=_LIMITS
    )
    body_timeout_seconds: values.Seconds = Field(
        default=10, description="How long a caller may take to send its body.", json_schema_extra=_LIMITS
    )
    max_connections: int = Field(
        default=1024, ge=1, le=1_000_000, description="Open connections at most.", json_schema_extra=_LIMITS
    )
    max_connections_per_address: int = Field(
        default=256,
        ge=1,
        le=1_000_000,
        description="Open connections from one address at most, so that none can take them all.",
        json_schema_extra=_LIMITS,
    )
    max_concurrent_requests: int = Field(
        default=256,
        ge=1,
        le=1_000_000,
        description="Requests worked on at once; more are told to come back (503).",
        json_schema_extra=_LIMITS,
    )
    failure_rate_per_address: float = Field(
        default=60,
        gt=0,
        le=1e9,
        description="Requests per minute that may fail authentication from one address, before 429.",
        json_schema_extra=_LIMITS,
    )
    failure_burst_per_address: int = Field(
        default=120,
        ge=1,
        le=10**9,
        description="How many such failures may come at once.",
        json_schema_extra=_LIMITS,
    )
    request_rate_per_hotkey: float = Field(
        default=5000,
        gt=0,
        le=1e9,
        description="Authenticated requests per second from one hotkey, before 429.",
        json_schema_extra=_LIMITS,
    )
    request_burst_per_hotkey: int = Field(
        default=10_000,
        ge=1,
        le=10**9,
        description="How many authenticated requests may come at once.",
        json_schema_extra=_LIMITS,
    )
    max_live_nonces: int = Field(
        default=500_000,
        ge=1000,
        le=100_000_000,
        description="Nonces remembered at once, a quarter of them of one hotkey; beyond, requests get 503.",
        json_schema_extra=_LIMITS,
    )

    # Offers
    policy: str = Field(
        default=AUTO,
        min_length=1,
        description="What decides about offers: the name of a policy, or the path of a file. `auto`: h100x8 "
        "from 6 GPUs on, h100x4 below, everything-feasible without one.",
        json_schema_extra=_OFFERS,
    )
    policy_dir: values.AbsolutePath = Field(
        default_factory=lambda data: data["data_dir"] / "policies",
        description="Where policies of your own are looked up by name, before the shipped ones; by commands "
        "too, after `--dir`.",
        json_schema_extra={**_OFFERS, "default_text": "DATA_DIR/policies"},
    )
    profile: str = Field(
        default=AUTO,
        min_length=1,
        description="How trainings are planned: the name of a tuning profile, or the path of a file. `auto`: "
        "what the policy names, else h100x8 from 6 GPUs on, h100x4 below, cpu-demo without one.",
        json_schema_extra=_OFFERS,
    )
    profile_dir: values.AbsolutePath = Field(
        default_factory=lambda data: data["data_dir"] / "profiles",
        description="Where profiles of your own are looked up by name, before the shipped ones; by commands "
        "too, after `--dir`.",
        json_schema_extra={**_OFFERS, "default_text": "DATA_DIR/profiles"},
    )
    task_types: values.TaskTypes | None = Field(
        default=None,
        min_length=1,
        description="Take only these task types, whatever the policy says; also written instruct, chat, dpo, "
        "grpo, image.",
        json_schema_extra=_OFFERS,
    )
    max_hours: float | None = Field(
        default=None,
        gt=0,
        le=10_000,
        allow_inf_nan=False,
        description="Refuse offers of more hours than this, whatever the policy says.",
        json_schema_extra=_OFFERS,
    )
    max_jobs: int | None = Field(
        default=None,
        ge=0,
        le=10_000,
        description="Jobs and held offers at once, whatever the policy says. 0 refuses all offers.",
        json_schema_extra=_OFFERS,
    )
    offer_hold_seconds: values.Seconds = Field(
        default=900,
        description="How long an accepted offer holds its place while its start does not come.",
        json_schema_extra=_OFFERS,
    )
    refusal_seconds: values.Seconds = Field(
        default=600,
        description="How long a refusal is repeated to whoever asks again; later the offer is decided anew.",
        json_schema_extra=_OFFERS,
    )
    queue_patience_seconds: values.Seconds = Field(
        default=3600,
        description="A job that waits longer than this for GPUs goes before those that are worth more.",
        json_schema_extra=_OFFERS,
    )

    # GPUs
    gpus: values.Gpus = Field(
        default=AUTO,
        description="The cards to train on: `nvml` (as the driver says), `4xH100` and the like (nobody "
        "looks), `cpu` (a pretend card), or `auto`: as the driver says, a pretend card without a driver.",
        json_schema_extra=_GPUS,
    )
    fleet_file: values.AbsolutePath | None = Field(
        default=None,
        description="A YAML file with what you know of this host's cards; followed while the daemon runs.",
        json_schema_extra=_GPUS,
    )
    gpu_refresh_seconds: values.Seconds = Field(
        default=5, description="How often the cards are looked at.", json_schema_extra=_GPUS
    )
    gpu_return_seconds: values.Seconds = Field(
        default=300,
        description="How long a card that failed or was in others' use must be fine before it is used again.",
        json_schema_extra=_GPUS,
    )

    # History
    history_days: int = Field(
        default=90,
        ge=1,
        le=36_500,
        description="How long offers without a job, their decisions and events are kept. Jobs are kept.",
        json_schema_extra=_HISTORY,
    )

    # Hub
    hub: values.Hub = Field(
        default_factory=lambda data: (
            values.HUGGINGFACE
            if data["chain"] is ChainKind.BITTENSOR
            else f"local:{data['data_dir'] / 'hub'}"
        ),
        description="Where submissions are published: `huggingface`, or `local:DIR`, a folder (no network).",
        json_schema_extra={**_HUB, "default_text": "huggingface; local:DATA_DIR/hub with CHAIN=file"},
    )
    hf_user: values.HubUser | None = Field(
        default=None,
        description="The user or organisation to publish as; HF_TOKEN must be allowed to write there.",
        json_schema_extra={**_HUB, "default_text": "the user of HF_TOKEN"},
    )
    hf_endpoint: values.SiteUrl = Field(
        default="https://huggingface.co",
        description="Where models come from and submissions go: the Hugging Face hub or what speaks like it.",
        json_schema_extra=_HUB,
    )
    hf_token: values.Secret | None = Field(
        default=None,
        description="The account's token: for gated models, higher limits, and to publish.",
        json_schema_extra=_HUB,
    )

    # Inputs
    model_cache_dir: values.AbsolutePath = Field(
        default_factory=lambda data: data["data_dir"] / "models",
        description="Where base models are kept for all jobs; another disk is fine.",
        json_schema_extra={**_INPUTS, "default_text": "DATA_DIR/models"},
    )
    model_cache_bytes: Annotated[ByteSize, Field(ge=10**9)] = Field(
        default=ByteSize(500 * 10**9),
        description="What the models may take in all. The least recently used that no job needs goes first.",
        json_schema_extra={**_INPUTS, "default_text": "500GB"},
    )
    min_free_disk_bytes: Annotated[ByteSize, Field(ge=0)] = Field(
        default=ByteSize(20 * 10**9),
        description="Fetching leaves this much of a disk free: a training needs room for its checkpoints.",
        json_schema_extra={**_INPUTS, "default_text": "20GB"},
    )
    dataset_max_bytes: Annotated[ByteSize, Field(ge=1024, le=10**12)] = Field(
        default=ByteSize(2 * 1024**3),
        description="The largest dataset that is fetched. Validators send at most 2GiB.",
        json_schema_extra={**_INPUTS, "default_text": "2GiB"},
    )
    dataset_timeout_seconds: values.Seconds = Field(
        default=1800,
        description="The longest that one try to fetch a dataset may take; the next goes on from there.",
        json_schema_extra=_INPUTS,
    )
    allow_private_networks: values.Networks = Field(
        default=(),
        description="Networks that a dataset's URL may lead to although they are not of the internet, such "
        "as 10.0.0.0/8. Validators' URLs come from outside: leave it empty but in tests.",
        json_schema_extra=_INPUTS,
    )

    # Training engine
    engine: EngineKind = Field(
        default=EngineKind.AUTO,
        description="What runs training: `docker`, local processes (`process`), or `auto`: Docker where it "
        "answers and has the image, else processes. With `none` offers are answered and nothing is trained: "
        "for trying things out.",
        json_schema_extra=_TRAINING,
    )
    docker_host: values.DockerHost = Field(
        default="unix:///var/run/docker.sock",
        description="The socket of the Docker Engine. It must be on this machine: it is given our folders.",
        json_schema_extra=_TRAINING,
    )
    trainer_text_image: values.ImageName = Field(
        default="god-miner/text-trainer:latest",
        description="The image for text tasks.",
        json_schema_extra=_TRAINING,
    )
    trainer_image_image: values.ImageName = Field(
        default="god-miner/image-trainer:latest",
        description="The image for image tasks trained by kohya's scripts.",
        json_schema_extra=_TRAINING,
    )
    trainer_toolkit_image: values.ImageName = Field(
        default="god-miner/toolkit-trainer:latest",
        description="The image for image tasks trained by ai-toolkit.",
        json_schema_extra=_TRAINING,
    )
    trainer_python: values.AbsolutePath | None = Field(
        default=None,
        description="The python that local processes train with; else the one of `make training`, or the "
        "daemon's own where that has torch.",
        json_schema_extra=_TRAINING,
    )
    trainer_sandbox: SandboxKind = Field(
        default=SandboxKind.AUTO,
        description="Local processes run in a sandbox where bubblewrap can make one. `off`: never, and tasks "
        "with reward functions are refused.",
        json_schema_extra=_TRAINING,
    )
    trainer_uid: int = Field(
        default=10002,
        ge=1,
        le=2**31 - 2,
        description="The user and group number that training runs as when the daemon is root; else it is the "
        "daemon's own.",
        json_schema_extra=_TRAINING,
    )
    trainer_ulimits: values.Ulimits = Field(
        default=("core=0", "memlock=-1", "stack=67108864"),
        description="Limits of the training's processes, as `ulimit` knows them, in bytes; -1: none.",
        json_schema_extra=_TRAINING,
    )
    trainer_processes: int = Field(
        default=16_384,
        ge=16,
        le=4_000_000,
        description="Processes and threads of one training at most.",
        json_schema_extra=_TRAINING,
    )

    # Jobs
    max_attempts: int = Field(
        default=5,
        ge=1,
        le=100,
        description="Attempts at one job. Those that ran out of GPU memory or disk do not count.",
        json_schema_extra=_JOBS,
    )
    publish_margin_seconds: values.Seconds = Field(
        default=180,
        description="How long before the deadline a submission is complete; a quarter of a job's time at "
        "most.",
        json_schema_extra=_JOBS,
    )
    publish_early: bool = Field(
        default=True,
        description="Publish the first model as soon as there is one, and better ones as they come.",
        json_schema_extra=_JOBS,
    )
    stop_grace_seconds: values.Seconds = Field(
        default=90,
        description="How long a training may take to save and end after it was asked to; then it is killed.",
        json_schema_extra=_JOBS,
    )
    stall_factor: float = Field(
        default=20,
        ge=2,
        le=10_000,
        description="A training without a step for this many times its usual step counts as hung.",
        json_schema_extra=_JOBS,
    )
    stall_min_seconds: values.Seconds = Field(
        default=600,
        description="But not before this long without a step.",
        json_schema_extra=_JOBS,
    )
    silence_limit_seconds: values.Seconds = Field(
        default=3600,
        description="Nothing heard for this long while loading, evaluating or saving counts as hung.",
        json_schema_extra=_JOBS,
    )
    job_poll_seconds: values.Seconds = Field(
        default=1,
        description="How often a training's progress is looked at.",
        json_schema_extra=_JOBS,
    )
    retry_pause_seconds: values.Seconds = Field(
        default=5,
        description="The first pause before something that failed is tried again; it doubles, with jitter.",
        json_schema_extra=_JOBS,
    )
    retry_pause_max_seconds: values.Seconds = Field(
        default=120, description="The longest such pause.", json_schema_extra=_JOBS
    )
    keep_finished_hours: float = Field(
        default=24,
        ge=0,
        le=24 * 365,
        allow_inf_nan=False,
        description="How long inputs, models and checkpoints of a finished job are kept; its plans, results "
        "and logs (of long ones a megabyte) stay. When the disk is full they go at once.",
        json_schema_extra=_JOBS,
    )

    # Tournament repositories
    training_repo_text_url: values.GithubUrl | None = Field(
        default=None,
        description="The repository entered in text tournaments: https://github.com/owner/name.",
        json_schema_extra=_TOURNAMENT,
    )
    training_repo_text_commit: values.Commit | None = Field(
        default=None, description="Its commit, all 40 digits.", json_schema_extra=_TOURNAMENT
    )
    training_repo_text_token: values.Secret | None = Field(
        default=None,
        description="A GitHub token that can read it, if private. Sent to validators.",
        json_schema_extra=_TOURNAMENT,
    )
    training_repo_text_datasets: values.Datasets = Field(
        default=(),
        description="Datasets asked for in text tournaments, two at most.",
        json_schema_extra=_TOURNAMENT,
    )
    training_repo_image_url: values.GithubUrl | None = Field(
        default=None,
        description="The repository entered in image tournaments: https://github.com/owner/name.",
        json_schema_extra=_TOURNAMENT,
    )
    training_repo_image_commit: values.Commit | None = Field(
        default=None, description="Its commit, all 40 digits.", json_schema_extra=_TOURNAMENT
    )
    training_repo_image_token: values.Secret | None = Field(
        default=None,
        description="A GitHub token that can read it, if private. Sent to validators.",
        json_schema_extra=_TOURNAMENT,
    )
    training_repo_image_datasets: values.Datasets = Field(
        default=(),
        description="Datasets asked for in image tournaments, two at most.",
        json_schema_extra=_TOURNAMENT,
    )
    training_repo_environment_url: values.GithubUrl | None = Field(
        default=None,
        description="The repository entered in environment tournaments: https://github.com/owner/name.",
        json_schema_extra=_TOURNAMENT,
    )
    training_repo_environment_commit: values.Commit | None = Field(
        default=None, description="Its commit, all 40 digits.", json_schema_extra=_TOURNAMENT
    )
    training_repo_environment_token: values.Secret | None = Field(
        default=None,
        description="A GitHub token that can read it, if private. Sent to validators.",
        json_schema_extra=_TOURNAMENT,
    )
    training_repo_environment_datasets: values.Datasets = Field(
        default=(),
        description="Datasets asked for in environment tournaments, two at most.",
        json_schema_extra=_TOURNAMENT,
    )

    # Running
    log_level: LogLevel = Field(
        default="INFO", description="DEBUG, INFO, WARNING or ERROR.", json_schema_extra=_RUNNING
    )
    log_format: LogFormat = Field(
        default=LogFormat.AUTO,
        description="`console` for people, `json` for machines; `auto` is console on a terminal, else json.",
        json_schema_extra=_RUNNING,
    )
    shutdown_grace_seconds: values.Seconds = Field(
        default=20,
        description="How long requests in flight may take to finish after SIGTERM.",
        json_schema_extra=_RUNNING,
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
    def fields_fit_together(self) -> Self:
        broken = rules.broken(self)
        if broken:
            text = "; ".join(f"{rule.fields[0].upper()}: {rule.text}" for rule in broken)
            raise PydanticCustomError("broken_rules", "{text}", {"text": text, "broken": broken})
        return self

    @property
    def warnings(self) -> tuple[str, ...]:
        """What looked odd in `.env` without being wrong."""
        return self._warnings

    @property
    def axon_port(self) -> int:
        """The port to publish on chain."""
        return self.published_port or self.public_port

    def source_of(self, name: str) -> Source:
        """Where a field's value came from."""
        return self._sources.get(name, "default")

    def ulimits(self) -> dict[str, int]:
        """TRAINER_ULIMITS by name."""
        return {name: int(value) for name, _, value in (one.partition("=") for one in self.trainer_ulimits)}

    def training_repo(self, task_type: str) -> TrainingRepo | None:
        """What was entered for a tournament type (`text`, `image` or `environment`), if anything."""
        found = {part: getattr(self, f"training_repo_{task_type}_{part}", None) for part in _REPO_PARTS}
        if not found["url"] or not found["commit"]:
            return None
        return TrainingRepo(found["url"], found["commit"], found["token"], found["datasets"] or ())

    def secrets(self) -> Iterator[str]:
        """Every secret in plain text, for the log redactor and nothing else."""
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, SecretStr):
                yield value.get_secret_value()
        yield from keys_in(self.subtensor_address or "")

    def shown(self, name: str) -> Any:
        """A field's value as it may be printed."""
        value = getattr(self, name)
        if isinstance(value, SecretStr):
            return HIDDEN
        if name == "subtensor_address" and value:
            return without_keys(value)
        return value

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        yield from ((name, self.shown(name)) for name in type(self).model_fields)


_REPO_PARTS = ("url", "commit", "token", "datasets")

#: Fields whose value is never printed.
SECRET_FIELDS = frozenset(
    name for name, field in Settings.model_fields.items() if "SecretStr" in str(field.annotation)
)


def keys_in(address: str) -> Iterator[str]:
    """What is secret in a chain node's address: the password, and the keys that providers put in the path."""
    parts = urlsplit(address)
    keys = [parts.password or "", *re.split(r"[/?&=]", f"{parts.path}?{parts.query}")]
    for key in filter(lambda key: key == parts.password or len(key) >= MIN_KEY_LENGTH, keys):
        yield from {key, unquote(key)}


def without_keys(address: str) -> str:
    """An address as it may be printed."""
    for key in keys_in(address):
        address = address.replace(key, HIDDEN)
    return address
