"""What a child of the wrapper is started with: offline, and with every cache in the work folder.

A tournament's container may run as any user, without a home, without capabilities, with a read-only cache:
none of the libraries may find that out by itself.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

#: No library asks the network, nor tells it anything.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "AXOLOTL_DO_NOT_TRACK": "1",
    "WANDB_MODE": "offline",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}

#: The driver's user-space half that CUDA's own images bring along, for hosts with an older branch of it.
COMPAT = Path("/usr/local/cuda/compat")
DRIVER = Path("/proc/driver/nvidia/version")


def child_environment(work: Path, more: Mapping[str, str], path: tuple[str, ...] = ()) -> dict[str, str]:
    """For a child that runs our code: the plan's variables over ours, our packages first on its path."""
    found = _offline(work, more)
    inherited = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    found["PYTHONPATH"] = os.pathsep.join([*path, str(ROOT), *inherited])
    # The engine's folder has modules with names of their own; the working folder must not be searched.
    found["PYTHONSAFEPATH"] = "1"
    return found


def engine_environment(work: Path, more: Mapping[str, str]) -> dict[str, str]:
    """For an image engine: it imports its own modules from its script's directory, and nothing of ours."""
    found = _offline(work, more)
    found.pop("PYTHONPATH", None)
    found.pop("PYTHONSAFEPATH", None)
    return found


def _offline(work: Path, more: Mapping[str, str]) -> dict[str, str]:
    caches = _caches(work)
    for folder in {*caches.values()}:
        Path(folder).mkdir(parents=True, exist_ok=True)
    found = {**os.environ, **OFFLINE, **caches, **more}
    if _driver_is_older():
        found["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(COMPAT), found.get("LD_LIBRARY_PATH")]))
    # torch asks for the user's name where it makes up a cache folder; a uid without an entry has none.
    found.setdefault("USER", "trainer")
    found.setdefault("LOGNAME", found["USER"])
    return found


def _driver_is_older() -> bool:
    """Whether the host's driver is of an older branch than the image's CUDA asks for: CUDA 13 wants 580, many
    hosts have 535 to 570. NVIDIA supports this on data center GPUs from 535 on; container toolkits of 1.17.4
    and some later ones do not see to it. With a driver as new or newer, the image's half would fail."""
    try:
        host = re.search(r"\b(\d{3,})\.\d", DRIVER.read_text("utf-8"))
    except OSError:
        return False
    brought = [int(path.name.split(".")[2]) for path in COMPAT.glob("libcuda.so.[0-9]*.*")]
    return host is not None and bool(brought) and max(brought) > int(host[1])


def _caches(work: Path) -> dict[str, str]:
    cache = work / "cache"
    # Sockets are made in the temporary folder, and their paths may have 107 letters: a short one is kept.
    temporary = {} if _writable_temporary() else {"TMPDIR": str(cache / "tmp")}
    return {
        **temporary,
        "HOME": str(cache / "home"),
        "XDG_CACHE_HOME": str(cache),
        "HF_HOME": str(cache / "hf"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "MPLCONFIGDIR": str(cache / "matplotlib"),
        "NUMBA_CACHE_DIR": str(cache / "numba"),
        "WANDB_DIR": str(cache / "wandb"),
    }


def _writable_temporary() -> bool:
    try:
        with tempfile.TemporaryFile():
            return True
    except OSError:
        return False
