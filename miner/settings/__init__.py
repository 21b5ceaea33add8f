"""The daemon's settings: read from the environment and `.env`, typed, all checked at once."""

from miner.settings.fields import ChainKind, LogFormat, SandboxKind
from miner.settings.load import load_settings
from miner.settings.model import SECRET_FIELDS, Settings, Source, TrainingRepo, without_keys
from miner.settings.values import BackendKind, is_loopback

__all__ = [
    "SECRET_FIELDS",
    "BackendKind",
    "ChainKind",
    "LogFormat",
    "SandboxKind",
    "Settings",
    "Source",
    "TrainingRepo",
    "is_loopback",
    "load_settings",
    "without_keys",
]
