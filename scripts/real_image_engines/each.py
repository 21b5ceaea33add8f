"""One configuration after the other, each in a fork of a process that has imported the engine.

Imported by the engines' Pythons. A result is one line of JSON on stdout; the engine writes to its own log.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: For one configuration; most of them take seconds.
LIMIT_S = 600


def run_each(engine: str, directory: Path, attempt: Callable[[Path, dict[str, Any], Path], str]) -> int:
    """`attempt(folder, case, scratch)` returns what is to be said of a success, and raises for a failure."""
    failures = 0
    for record in sorted(directory.glob("*/case.json")):
        case = json.loads(record.read_text("utf-8"))
        if case["engine"] != engine:
            continue
        result = _one(record.parent, case, attempt)
        failures += not result["ok"]
        print(json.dumps({**case, **result}), flush=True)
    return 1 if failures else 0


def _one(folder: Path, case: dict[str, Any], attempt: Callable[..., str]) -> dict[str, Any]:
    scratch, log, said = folder / "scratch", folder / "log", folder / "said"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    said.unlink(missing_ok=True)
    began = time.monotonic()
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        _redirect(log)
        signal.alarm(LIMIT_S)
        code = 1
        try:
            said.write_text(attempt(folder, case, scratch), encoding="utf-8")
            code = 0
        except BaseException as error:  # noqa: BLE001 - engines leave with sys.exit as well
            traceback.print_exc()
            said.write_text(f"{type(error).__name__}: {error}"[:300], encoding="utf-8")
        finally:
            sys.stderr.flush()
            os._exit(code)
    _, status, usage = os.wait4(child, 0)
    code = os.waitstatus_to_exitcode(status)
    text = said.read_text("utf-8") if said.exists() else f"ended with {code}; see {log}"
    shutil.rmtree(scratch, ignore_errors=True)
    seconds, peak = round(time.monotonic() - began, 1), usage.ru_maxrss * 1024
    return {"ok": code == 0, "said": text, "seconds": seconds, "peak_bytes": peak}


def _redirect(log: Path) -> None:
    with log.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)


def keys_of_adapter(path: Path) -> set[str]:
    """The names before the first layer: what the evaluator's loader goes by."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
        changed = [
            name
            for name in names
            if name.endswith(("lora_B.weight", "lora_up.weight")) and bool(file.get_tensor(name).any())
        ]
    if not changed:
        raise ValueError(f"{path.name}: nothing was learned, every second matrix is zero")
    return {key_prefix(name) for name in names}


def key_prefix(name: str) -> str:
    """`lora_te1_…` → `lora_te1`, `diffusion_model.layers.0…` → `diffusion_model.layers`."""
    first, _, rest = name.partition(".")
    return (
        "_".join(first.split("_")[:2]) if first.startswith("lora_") else f"{first}.{rest.partition('.')[0]}"
    )
