"""Where the shipped configuration lies: beside the packages in a checkout, inside `core` in a wheel."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from core.errors import GodMinerError


class MissingConfigs(GodMinerError):
    """The installation lacks its own files."""

    code = "missing_configs"


@lru_cache(maxsize=1)
def config_dir() -> Path:
    here = Path(__file__).resolve().parent
    for candidate in (here / "configs", here.parent / "configs"):
        if (candidate / "profiles").is_dir():
            return candidate
    raise MissingConfigs(
        f"no configs/profiles beside {here}: the installation is incomplete, install the package again"
    )
