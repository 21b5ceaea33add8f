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


class SandboxKind(StrEnum):
    AUTO = "auto"
    OFF = "off"


class LogFormat(StrEnum):
    AUTO = "auto"
    CONSOLE = "console"
    JSON = "json"


def _upper(value: Any) -> Any:
    return value.upper() if isinstance(value, str) else value


LogLevel = Annotated[
    Literal["DEBUG", "INFO", "WARNING", "ERROR"],
    BeforeValidator(_upper),
]


class Section(BaseModel, defer_build=True):
    """A part of `Settings`, which inherits from all of them."""

    title: ClassVar[str]


def setting(default: Any, meaning: str, *, shown_default: str | None = None, **bounds: Any) -> Any:
    """Declare a setting; `shown_default` stands in the documents if the default itself says too little."""
    extra: JsonDict | None = None if shown_default is None else {"shown_default": shown_default}
    return Field(default, description=meaning, json_schema_extra=extra, **bounds)


def _in_data_dir(name: str, meaning: str) -> Any:
    return Field(
        default_factory=lambda data: data["data_dir"] / name,
        description=meaning,
        json_schema_extra={"shown_default": f"DATA_DIR/{name}"},
    )


def _data_dir(data: dict[str, Any]) -> Path:
    directory: Path = data["data_dir"]
    return directory


class FilesSection(Section):
    title = "Files"

    data_dir: values.AbsolutePath = setting(
        Path(".god-miner"),
        "The daemon's files; with a cluster on a file system that all nodes share. One daemon per directory.",
    )
    store_dir: values.AbsolutePath = Field(
        default_factory=_data_dir,
        description="Directory of the database, on a disk of this machine: SQLite is not safe on NFS.",
        json_schema_extra={"shown_default": "DATA_DIR"},
    )


class ChainSection(Section):
    title = "Chain"

    netuid: int = setting(56, "The subnet.", ge=0, le=65535)
    chain: ChainKind = setting(
        ChainKind.FILE,
        "Source of hotkeys and stakes: `bittensor`, or `file` for NODES_FILE (no network).",
    )
    subtensor_network: Literal["finney", "test", "archive", "devnet", "local"] = setting(
        "finney", "The chain's network."
    )
    subtensor_address: values.Websocket | None = setting(
        None, "Your own chain node (ws:// or wss://), instead of SUBTENSOR_NETWORK."
    )
    nodes_file: values.AbsolutePath = _in_data_dir(
        "nodes.json", "The subnet's nodes as JSON, for CHAIN=file; reread when it changes."
    )


class WalletSection(Section):
    title = "Wallet"

    wallet_name: values.FileName = setting("default", "The wallet's name.")
    hotkey_name: values.FileName = setting("default", "The hotkey that this miner answers as.")
    wallet_path: values.AbsolutePath = setting(Path("~/.bittensor/wallets"), "Directory of the wallets.")
    wallet_password: values.Secret | None = setting(
        None, "Opens an encrypted hotkey; never asked for interactively."
    )


class CallersSection(Section):
    title = "Who may call"

    min_stake_threshold: float = setting(
        1000.0, "Callers with less stake are refused. 0 on a test network.", ge=0, allow_inf_nan=False
    )
    require_validator_permit: bool = setting(
        True,
        "Refuse callers without a validator permit. Callers may start tasks and read TRAINING_REPO_*_TOKEN, "
        "and stake alone is cheap.",
    )
    allow_hotkeys: values.Hotkeys = setting((), "If set, only these hotkeys may call.")
    deny_hotkeys: values.Hotkeys = setting((), "These hotkeys may never call.")


class PublicPortSection(Section):
    title = "Public port"

    public_host: values.ListenHost = setting(
        "0.0.0.0",  # noqa: S104 - validators come from the internet
        "Address to listen on for validators.",
    )
    public_port: values.Port = setting(7999, "Port to listen on for validators (0: any free one).")
    public_ip: values.AxonIp | None = setting(None, "IPv4 address to publish on chain.")
    published_port: Annotated[int, Field(ge=1, le=65535)] | None = setting(
        None,
        "Port to publish on chain, if a port mapping changes it.",
        shown_default="PUBLIC_PORT",
    )
    max_connections: int = setting(
        1024,
        "Most open connections, a quarter of them for addresses of validators that were let in before.",
        ge=1,
        le=1_000_000,
    )
    allow_private_axon: bool = setting(False, "Allow a private PUBLIC_IP, for a chain of your own.")


class OperatorPortSection(Section):
    title = "Operator port"

    operator_host: values.ListenHost = setting(
        "127.0.0.1", "Address to listen on for the operator: metrics and status."
    )
    operator_port: values.Port = setting(7998, "Port to listen on for the operator (0: any free one).")
    operator_token: values.Token | None = setting(
        None,
        "Bearer token of the operator port. Default: made at the first start, in DATA_DIR/operator-token. "
        "Required when OPERATOR_HOST is not loopback.",
    )


class DashboardSection(Section):
    title = "Dashboard"

    dashboard_host: values.ListenHost = setting(
        "127.0.0.1", "Address that the page of `god-miner dashboard` listens on."
    )
    dashboard_port: values.Port = setting(7997, "Its port (0: any free one).")
    dashboard_password: values.Password | None = setting(
        None,
        "Password of the page. Required when DASHBOARD_HOST is not loopback, or a proxy offers the page "
        "under one of DASHBOARD_NAMES.",
    )
    dashboard_names: values.HostNames = setting(
        (), "Names under which a proxy with TLS offers the page, like miner.example.org."
    )
    dashboard_daemons: values.DaemonUrls = setting(
        (),
        "The daemons to show, like rack1=http://127.0.0.1:7998 rack2=https://10.0.0.2:443. The token of one "
        "is in DATA_DIR/operator-token-NAME, else it is this machine's. Default: this machine's daemon.",
    )


class OffersSection(Section):
    title = "Offers"

    policy: str = setting(
        AUTO,
        "Acceptance policy, by name or path. `auto`: h100x8 from 6 GPUs on, h100x4 below, "
        "everything-feasible without a GPU.",
        min_length=1,
    )
    policy_dir: values.AbsolutePath = _in_data_dir(
        "policies",
        "Directory of your own policies, searched before the shipped ones.",
    )
    profile: str = setting(
        AUTO,
        "Tuning profile, by name or path. `auto`: the one that the policy names, else h100x8 from 6 GPUs on, "
        "h100x4 below, cpu-demo without a GPU.",
        min_length=1,
    )
    profile_dir: values.AbsolutePath = _in_data_dir(
        "profiles",
        "Directory of your own profiles, searched before the shipped ones.",
    )
    task_types: values.TaskTypes | None = setting(
        None,
        "Accept only these task types, whatever the policy says: instruct, chat, dpo, grpo, image.",
        min_length=1,
    )
    max_hours: float | None = setting(
        None,
        "Refuse longer offers, whatever the policy says.",
        gt=0,
        le=10_000,
        allow_inf_nan=False,
    )
    max_jobs: int | None = setting(
        None,
        "Most jobs and held offers at once, whatever the policy says. 0 refuses all offers.",
        ge=0,
        le=10_000,
    )
    offer_hold_seconds: values.Seconds = setting(
        900, "How long an accepted offer holds its GPUs without a start."
    )


class GpusSection(Section):
    title = "GPUs"

    gpus: values.Gpus = setting(
        AUTO,
        "GPUs to train on: `nvml` (asks the driver), `4xH100` (taken as given), `cpu` (simulated), or "
        "`auto`: "
        "`nvml` with a driver, else `cpu`.",
    )
    fleet_file: values.AbsolutePath | None = setting(
        None, "YAML file that describes this host's GPUs; reread when it changes."
    )


class MoneySection(Section):
    title = "Money"

    gpu_price_per_hour: values.Price | None = setting(
        None,
        "What a GPU costs in an hour, in dollars; `prices` in FLEET_FILE has other prices for some kinds. "
        "Unset: no costs are shown.",
    )
    tao_price: values.Price | None = setting(
        None, "What a TAO is worth, in dollars. Unset: what was earned is shown in TAO only."
    )


class AlertsSection(Section):
    title = "Alerts"

    alerts_file: values.AbsolutePath = _in_data_dir(
        "alerts.yaml",
        "Your own alert rules, laid over the shipped ones key by key; reread when it changes.",
    )


class HistorySection(Section):
    title = "History"

    history_days: int = setting(
        90,
        "How long offers without a job, their decisions and events are kept. Measurements: minutes for 7 "
        "days, hours for so long, and at least 400 days.",
        ge=1,
        le=36_500,
    )


def _default_hub(data: dict[str, Any]) -> str:
    if data["chain"] is ChainKind.BITTENSOR:
        return values.HUGGINGFACE
    return f"local:{data['data_dir'] / 'hub'}"


class HubSection(Section):
    title = "Hub"

    hub: values.Hub = Field(
        default_factory=_default_hub,
        description="Where to publish: `huggingface`, or `local:DIR`, a directory (no network).",
        json_schema_extra={"shown_default": "huggingface; local:DATA_DIR/hub with CHAIN=file"},
    )
    hf_user: values.HubUser | None = setting(
        None,
        "User or organisation to publish as; HF_TOKEN must have write access.",
        shown_default="the user of HF_TOKEN",
    )
    hf_endpoint: values.SiteUrl = setting(
        "https://huggingface.co",
        "The hub for models and submissions, or a compatible server.",
    )
    hf_token: values.Secret | None = setting(
        None, "Hub token, to publish, for gated models and higher limits."
    )


class InputsSection(Section):
    title = "Inputs"

    model_cache_dir: values.AbsolutePath = _in_data_dir(
        "models", "Cache of base models; another disk is fine."
    )
    model_cache_bytes: Annotated[ByteSize, Field(ge=10**9)] = setting(
        "500GB", "Size of that cache. The least recently used model that no job needs is removed first."
    )
    min_free_disk_bytes: Annotated[ByteSize, Field(ge=0)] = setting(
        "20GB", "Disk space that downloads leave free, for checkpoints."
    )
    dataset_max_bytes: Annotated[ByteSize, Field(ge=1024, le=10**12)] = setting(
        "2GiB", "Largest dataset. Validators send at most 2GiB."
    )
    allow_private_networks: values.Networks = setting(
        (),
        "Private networks that dataset URLs may lead to, like 10.0.0.0/8. For tests only.",
    )


class BackendSection(Section):
    title = "Backend"

    backend: values.BackendKinds = setting(
        (values.BackendKind.AUTO,),
        "What runs training: `docker`, `process` (local processes), `auto` (Docker if it answers and has the "
        "image, else processes), `slurm` (a cluster's nodes), or `none`: answer offers, train nothing. "
        "`docker,slurm` uses this machine's GPUs and the cluster's.",
    )
    trainer_python: values.AbsolutePath | None = setting(
        None,
        "Python for local processes. Default: that of `make training`, else the daemon's if it has torch.",
    )
    trainer_sandbox: SandboxKind = setting(
        SandboxKind.AUTO,
        "Sandbox local processes where bubblewrap works. `off`: never, and GRPO tasks are refused.",
    )
    trainer_uid: int = setting(
        10002,
        "User and group id of trainings when the daemon is root.",
        ge=1,
        le=2**31 - 2,
    )
    trainer_ulimits: values.Ulimits = setting(
        ("core=0", "memlock=-1", "stack=67108864"),
        "Ulimits of trainings, in bytes; -1: none.",
    )


class JobsSection(Section):
    title = "Jobs"

    max_attempts: int = setting(
        5, "Most attempts at a job, not counting those that ran out of GPU memory or disk.", ge=1, le=100
    )
    publish_early: bool = setting(True, "Publish the first model at once, and better ones as they come.")
    stop_grace_seconds: values.Seconds = setting(
        90, "Time to save and end when asked to stop; then it is killed."
    )
    keep_finished_hours: float = setting(
        24,
        "How long inputs, models and checkpoints of a finished job are kept, unless the disk is full. "
        "Plans, results and logs (a megabyte of each) stay.",
        ge=0,
        le=24 * 365,
        allow_inf_nan=False,
    )


def _repo_url(kind: str) -> Any:
    return setting(None, f"Repository for {kind} tournaments: https://github.com/owner/name.")


def _repo_commit() -> Any:
    return setting(None, "Its commit, 40 digits.")


def _repo_token() -> Any:
    return setting(None, "GitHub token that can read it, if private. Sent to validators.")


def _repo_datasets() -> Any:
    return setting((), "Datasets to ask for, at most two.")


class TournamentSection(Section):
    title = "Tournaments"

    public_api_url: values.SiteUrl = setting(
        "https://api.gradients.io",
        "The subnet's public API: fees, balances and results of tournaments.",
    )
    training_repo_text_url: values.GithubUrl | None = _repo_url("text")
    training_repo_text_commit: values.Commit | None = _repo_commit()
    training_repo_text_token: values.Secret | None = _repo_token()
    training_repo_text_datasets: values.Datasets = _repo_datasets()
    training_repo_image_url: values.GithubUrl | None = _repo_url("image")
    training_repo_image_commit: values.Commit | None = _repo_commit()
    training_repo_image_token: values.Secret | None = _repo_token()
    training_repo_image_datasets: values.Datasets = _repo_datasets()
    training_repo_environment_url: values.GithubUrl | None = _repo_url("environment")
    training_repo_environment_commit: values.Commit | None = _repo_commit()
    training_repo_environment_token: values.Secret | None = _repo_token()
    training_repo_environment_datasets: values.Datasets = _repo_datasets()


class NotificationsSection(Section):
    title = "Notifications"

    notify_urls: values.NotifyUrls = setting(
        (),
        "Where alerts and reports are sent: addresses as Apprise has them (Discord, Telegram, Slack, mail, "
        "webhooks), separated by blanks.",
    )
    reports: values.Reports = setting(
        (), "Reports to send there when a period is over: daily, weekly, monthly."
    )


class RunningSection(Section):
    title = "Running"

    log_level: LogLevel = setting("INFO", "Least severe level that is logged.")
    log_format: LogFormat = setting(
        LogFormat.AUTO,
        "`auto`: console on a terminal, else json.",
    )
    shutdown_grace_seconds: values.Seconds = setting(20, "Time for requests in flight after SIGTERM.")
