"""The pages, one module each; `miner/dashboard/layout.py` says how one is written."""

from __future__ import annotations

import importlib
import pkgutil


def load_pages() -> None:
    """Import every module of this package: each registers its page."""
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        importlib.import_module(module.name)
