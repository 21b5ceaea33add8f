"""Every setting of the daemon, by section: its variable is the upper-case name, its meaning stands beside it.

The environment wins over `.env`, which wins over the default; an empty variable counts as not set.
"""

# No `annotations` from __future__: pydantic would evaluate every string of them twice, at each start.
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ByteSize, Field
from pydantic.config import JsonDict

from miner.settings import values

#: POLICY and PROFILE that nobody chose: by the GPUs that there are.
AUTO = "auto"


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


class Section(BaseModel, defer_build=True):
    """A part of `Settings`, which inherits from all of them."""

    title: ClassVar[str]


def _setting(default: Any, meaning: str, *, shown_default: str | None = None, **bounds: Any) -> Any:
    """Declare a setting; `shown_default` stands in the documents if the default itself says too little."""
    extra: JsonDict | None = None if shown_default is None else {"shown_default": shown_default}
    return Field(default, description=meaning, json_schema_extra=extra, **bounds)


def _in_data_dir(name: str, meaning: str) -> Any:
    return Field(
        default_factory=lambda data: data["data_dir"] / name,
        description=meaning,
        json_schema_extra={"shown_default": f"DATA_DIR/{name}"},
    )


class FilesSection(Section):
    title = "Files"

    data_dir: values.AbsolutePath = _setting(
        Path(".god-miner"), "Where the daemon keeps its database and files. One daemon per directory."
    )


class ChainSection(Section):
    title = "Chain"

    netuid: int = _setting(56, "The subnet.", ge=0, le=65535)
    chain: ChainKind = _setting(
        ChainKind.FILE,
        "Where hotkeys and stakes come from: `bittensor`, or `file` for NODES_FILE (no network).",
    )
    subtensor_network: Literal["finney", "test", "archive", "devnet", "local"] = _setting(
        "finney", "The chain's network by name."
    )
    subtensor_address: values.Websocket | None = _setting(
        None, "A chain node of your own, ws:// or wss://; takes the place of SUBTENSOR_NETWORK."
    )
    chain_timeout_seconds: values.Seconds = _setting(30, "The longest that one call to the chain may take.")
    metagraph_refresh_seconds: values.Seconds = _setting(300, "How often hotkeys and stakes are read again.")
    metagraph_stale_seconds: values.Seconds = _setting(
        3600, "From this age on, the last good copy of hotkeys and stakes counts as stale (an alert)."
    )
    nodes_file: values.AbsolutePath = _in_data_dir(
        "nodes.json", "The nodes of the subnet as JSON, for CHAIN=file; read again when it changes."
    )


class WalletSection(Section):
    title = "Wallet"

    wallet_name: values.FileName = _setting("default", "The wallet's name.")
    hotkey_name: values.FileName = _setting(
        "default", "The hotkey in that wallet that this miner answers as."
    )
    wallet_path: values.AbsolutePath = _setting(Path("~/.bittensor/wallets"), "Where wallets are kept.")
    wallet_password: values.Secret | None = _setting(
        None, "Opens an encrypted hotkey. Not asked for interactively: a daemon has nobody to ask."
    )


class CallersSection(Section):
    title = "Who may call"

    min_stake_threshold: float = _setting(
        1000.0, "Callers with less stake are refused. 0 on a test network.", ge=0, allow_inf_nan=False
    )
    require_validator_permit: bool = _setting(
        True,
        "Refuse callers without a validator permit: stake alone is cheap, and whoever is let in "
        "may start tasks and read TRAINING_REPO_*_TOKEN.",
    )
    allow_hotkeys: values.Hotkeys = _setting((), "If set, only these hotkeys may call.")
    deny_hotkeys: values.Hotkeys = _setting((), "These hotkeys may never call.")


class PublicPortSection(Section):
    title = "Public port"

    public_host: values.ListenHost = _setting(
        "0.0.0.0",  # noqa: S104 - validators come from the internet
        "The address to listen on for validators.",
    )
    public_port: values.Port = _setting(7999, "The port to listen on for validators (0: any free one).")
    public_ip: values.AxonIp | None = _setting(
        None, "The IPv4 address published on chain, where validators find this miner."
    )
    published_port: Annotated[int, Field(ge=1, le=65535)] | None = _setting(
        None,
        "The port published on chain, where a port mapping makes it differ from PUBLIC_PORT.",
        shown_default="PUBLIC_PORT",
    )
    allow_private_axon: bool = _setting(False, "Let a private PUBLIC_IP be published (a chain of your own).")


class OperatorPortSection(Section):
    title = "Operator port"

    operator_host: values.ListenHost = _setting(
        "127.0.0.1", "The address to listen on for the operator: metrics and status."
    )
    operator_port: values.Port = _setting(7998, "The port to listen on for the operator (0: any free one).")
    operator_token: values.Token | None = _setting(
        None,
        "Bearer token of the operator port. Unset: one is made at the first start, in the file "
        "operator-token of DATA_DIR, where only the daemon's user can read it. Required when "
        "OPERATOR_HOST is not loopback.",
    )


class LimitsSection(Section):
    title = "Limits"

    max_body_bytes: Annotated[ByteSize, Field(ge=1024, le=1024**3)] = _setting(
        "4MiB", "The largest request body, as bytes or with a unit: 4MiB, 4MB."
    )
    header_timeout_seconds: values.Seconds = _setting(5, "How long a caller may take to send its headers.")
    body_timeout_seconds: values.Seconds = _setting(10, "How long a caller may take to send its body.")
    max_connections: int = _setting(1024, "Open connections at most.", ge=1, le=1_000_000)
    max_connections_per_address: int = _setting(
        256, "Open connections from one address at most, so that none can take them all.", ge=1, le=1_000_000
    )
    max_concurrent_requests: int = _setting(
        256, "Requests worked on at once; more get 503.", ge=1, le=1_000_000
    )
    failure_rate_per_address: float = _setting(
        60, "Requests per minute that may fail authentication from one address, before 429.", gt=0, le=1e9
    )
    failure_burst_per_address: int = _setting(120, "How many such failures may come at once.", ge=1, le=10**9)
    request_rate_per_hotkey: float = _setting(
        5000, "Authenticated requests per second from one hotkey, before 429.", gt=0, le=1e9
    )
    request_burst_per_hotkey: int = _setting(
        10_000, "How many authenticated requests may come at once.", ge=1, le=10**9
    )
    max_live_nonces: int = _setting(
        500_000,
        "Nonces remembered at once, a quarter of them of one hotkey; beyond, requests get 503.",
        ge=1000,
        le=100_000_000,
    )


class OffersSection(Section):
    title = "Offers"

    policy: str = _setting(
        AUTO,
        "What decides about offers: the name of a policy, or the path of a file. `auto`: h100x8 "
        "from 6 GPUs on, h100x4 below, everything-feasible without one.",
        min_length=1,
    )
    policy_dir: values.AbsolutePath = _in_data_dir(
        "policies",
        "Where policies of your own are looked up by name, before the shipped ones; by commands "
        "too, after `--dir`.",
    )
    profile: str = _setting(
        AUTO,
        "How trainings are planned: the name of a tuning profile, or the path of a file. `auto`: "
        "what the policy names, else h100x8 from 6 GPUs on, h100x4 below, cpu-demo without one.",
        min_length=1,
    )
    profile_dir: values.AbsolutePath = _in_data_dir(
        "profiles",
        "Where profiles of your own are looked up by name, before the shipped ones; by commands "
        "too, after `--dir`.",
    )
    task_types: values.TaskTypes | None = _setting(
        None,
        "Take only these task types, whatever the policy says; also written instruct, chat, dpo, "
        "grpo, image.",
        min_length=1,
    )
    max_hours: float | None = _setting(
        None,
        "Refuse offers of more hours than this, whatever the policy says.",
        gt=0,
        le=10_000,
        allow_inf_nan=False,
    )
    max_jobs: int | None = _setting(
        None, "Jobs and held offers at once, whatever the policy says. 0 refuses all offers.", ge=0, le=10_000
    )
    offer_hold_seconds: values.Seconds = _setting(
        900, "How long an accepted offer holds its place while its start does not come."
    )
    refusal_seconds: values.Seconds = _setting(
        600, "How long a repeated offer gets the same refusal; after that it is decided again."
    )
    queue_patience_seconds: values.Seconds = _setting(
        3600, "A job that waits longer than this for GPUs goes before those that are worth more."
    )


class GpusSection(Section):
    title = "GPUs"

    gpus: values.Gpus = _setting(
        AUTO,
        "The GPUs to train on: `nvml` (as the driver says), `4xH100` and the like (nobody "
        "looks), `cpu` (a simulated GPU), or `auto`: as the driver says, a simulated GPU without a driver.",
    )
    fleet_file: values.AbsolutePath | None = _setting(
        None, "A YAML file with what you know of this host's GPUs; followed while the daemon runs."
    )
    gpu_refresh_seconds: values.Seconds = _setting(5, "How often the GPUs are scanned.")
    gpu_return_seconds: values.Seconds = _setting(
        300, "How long a GPU that failed or was in others' use must be fine before it is used again."
    )


class HistorySection(Section):
    title = "History"

    history_days: int = _setting(
        90,
        "How long offers without a job, their decisions and events are kept. Jobs are kept.",
        ge=1,
        le=36_500,
    )


class HubSection(Section):
    title = "Hub"

    hub: values.Hub = Field(
        default_factory=lambda data: (
            values.HUGGINGFACE
            if data["chain"] is ChainKind.BITTENSOR
            else f"local:{data['data_dir'] / 'hub'}"
        ),
        description="Where submissions are published: `huggingface`, or `local:DIR`, a folder (no network).",
        json_schema_extra={"shown_default": "huggingface; local:DATA_DIR/hub with CHAIN=file"},
    )
    hf_user: values.HubUser | None = _setting(
        None,
        "The user or organisation to publish as; HF_TOKEN must be allowed to write there.",
        shown_default="the user of HF_TOKEN",
    )
    hf_endpoint: values.SiteUrl = _setting(
        "https://huggingface.co",
        "Where models come from and submissions go: the Hugging Face hub or what speaks like it.",
    )
    hf_token: values.Secret | None = _setting(
        None, "The account's token: for gated models, higher limits, and to publish."
    )


class InputsSection(Section):
    title = "Inputs"

    model_cache_dir: values.AbsolutePath = _in_data_dir(
        "models", "Where base models are kept for all jobs; another disk is fine."
    )
    model_cache_bytes: Annotated[ByteSize, Field(ge=10**9)] = _setting(
        "500GB", "What the models may take in all. The least recently used that no job needs goes first."
    )
    min_free_disk_bytes: Annotated[ByteSize, Field(ge=0)] = _setting(
        "20GB", "Fetching leaves this much of a disk free: a training needs room for its checkpoints."
    )
    dataset_max_bytes: Annotated[ByteSize, Field(ge=1024, le=10**12)] = _setting(
        "2GiB", "The largest dataset that is fetched. Validators send at most 2GiB."
    )
    dataset_timeout_seconds: values.Seconds = _setting(
        1800, "The longest that one try to fetch a dataset may take; the next goes on from there."
    )
    allow_private_networks: values.Networks = _setting(
        (),
        "Networks that a dataset's URL may lead to although they are not of the internet, such "
        "as 10.0.0.0/8. Validators' URLs come from outside: leave it empty but in tests.",
    )


class TrainingEngineSection(Section):
    title = "Training engine"

    engine: EngineKind = _setting(
        EngineKind.AUTO,
        "What runs training: `docker`, local processes (`process`), or `auto`: Docker where it "
        "answers and has the image, else processes. With `none` offers are answered and nothing is trained: "
        "for trying things out.",
    )
    docker_host: values.DockerHost = _setting(
        "unix:///var/run/docker.sock",
        "The socket of the Docker Engine. It must be on this machine: it is given our folders.",
    )
    trainer_text_image: values.ImageName = _setting(
        "god-miner/text-trainer:latest", "The image for text tasks."
    )
    trainer_image_image: values.ImageName = _setting(
        "god-miner/image-trainer:latest", "The image for image tasks trained by kohya's scripts."
    )
    trainer_toolkit_image: values.ImageName = _setting(
        "god-miner/toolkit-trainer:latest", "The image for image tasks trained by ai-toolkit."
    )
    trainer_python: values.AbsolutePath | None = _setting(
        None,
        "The python that local processes train with; else the one of `make training`, or the "
        "daemon's own where that has torch.",
    )
    trainer_sandbox: SandboxKind = _setting(
        SandboxKind.AUTO,
        "Local processes run in a sandbox where bubblewrap can make one. `off`: never, and tasks "
        "with reward functions are refused.",
    )
    trainer_uid: int = _setting(
        10002,
        "The user and group number that training runs as when the daemon is root; else it is the "
        "daemon's own.",
        ge=1,
        le=2**31 - 2,
    )
    trainer_ulimits: values.Ulimits = _setting(
        ("core=0", "memlock=-1", "stack=67108864"),
        "Limits of the training's processes, as `ulimit` knows them, in bytes; -1: none.",
    )
    trainer_processes: int = _setting(
        16_384, "Processes and threads of one training at most.", ge=16, le=4_000_000
    )


class JobsSection(Section):
    title = "Jobs"

    max_attempts: int = _setting(
        5, "Attempts at one job. Those that ran out of GPU memory or disk do not count.", ge=1, le=100
    )
    publish_margin_seconds: values.Seconds = _setting(
        180, "How long before the deadline a submission is complete; a quarter of a job's time at most."
    )
    publish_early: bool = _setting(
        True, "Publish the first model as soon as there is one, and better ones as they come."
    )
    stop_grace_seconds: values.Seconds = _setting(
        90, "How long a training may take to save and end after it was asked to; then it is killed."
    )
    stall_factor: float = _setting(
        20, "A training without a step for this many times its usual step counts as hung.", ge=2, le=10_000
    )
    stall_min_seconds: values.Seconds = _setting(600, "But not before this long without a step.")
    silence_limit_seconds: values.Seconds = _setting(
        3600, "No progress for this long while loading, evaluating or saving counts as hung."
    )
    job_poll_seconds: values.Seconds = _setting(1, "How often a training's progress is looked at.")
    retry_pause_seconds: values.Seconds = _setting(
        5, "The first pause before something that failed is tried again; it doubles, with jitter."
    )
    retry_pause_max_seconds: values.Seconds = _setting(120, "The longest such pause.")
    keep_finished_hours: float = _setting(
        24,
        "How long inputs, models and checkpoints of a finished job are kept; its plans, results "
        "and logs (of long ones a megabyte) stay. When the disk is full they go at once.",
        ge=0,
        le=24 * 365,
        allow_inf_nan=False,
    )


def _repo_url(kind: str) -> Any:
    return _setting(None, f"The repository entered in {kind} tournaments: https://github.com/owner/name.")


def _repo_commit() -> Any:
    return _setting(None, "Its commit, all 40 digits.")


def _repo_token() -> Any:
    return _setting(None, "A GitHub token that can read it, if private. Sent to validators.")


def _repo_datasets(kind: str) -> Any:
    return _setting((), f"Datasets asked for in {kind} tournaments, two at most.")


class TournamentSection(Section):
    title = "Tournament repositories"

    training_repo_text_url: values.GithubUrl | None = _repo_url("text")
    training_repo_text_commit: values.Commit | None = _repo_commit()
    training_repo_text_token: values.Secret | None = _repo_token()
    training_repo_text_datasets: values.Datasets = _repo_datasets("text")
    training_repo_image_url: values.GithubUrl | None = _repo_url("image")
    training_repo_image_commit: values.Commit | None = _repo_commit()
    training_repo_image_token: values.Secret | None = _repo_token()
    training_repo_image_datasets: values.Datasets = _repo_datasets("image")
    training_repo_environment_url: values.GithubUrl | None = _repo_url("environment")
    training_repo_environment_commit: values.Commit | None = _repo_commit()
    training_repo_environment_token: values.Secret | None = _repo_token()
    training_repo_environment_datasets: values.Datasets = _repo_datasets("environment")


class RunningSection(Section):
    title = "Running"

    log_level: LogLevel = _setting("INFO", "DEBUG, INFO, WARNING or ERROR.")
    log_format: LogFormat = _setting(
        LogFormat.AUTO,
        "`console` for people, `json` for machines; `auto` is console on a terminal, else json.",
    )
    shutdown_grace_seconds: values.Seconds = _setting(
        20, "How long requests in flight may take to finish after SIGTERM."
    )
