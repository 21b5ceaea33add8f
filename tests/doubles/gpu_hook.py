"""Stands in for NVIDIA's container hook: a real Docker Engine then takes requests for GPUs that it lacks.

dockerd looks for `nvidia-container-runtime-hook` on its own PATH when it starts, and runs it as an OCI
prestart hook with its own environment: the container's state on stdin, the container's environment in the
bundle.

- `FAKE_GPUS`: what is there, as ids with commas; an unknown id fails like the real hook does.
- `FAKE_HOOK_LOG`: every call as a line of JSON.
- `FAKE_NVML_LIB`: a stub of libnvidia-ml, mounted into the container as the real hook mounts the driver.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

NAME = "nvidia-container-runtime-hook"
LIBRARY = "usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"


def main() -> int:
    state = json.load(sys.stdin)
    bundle = Path(state["bundle"])
    config = json.loads((bundle / "config.json").read_text())
    environment = dict(line.split("=", 1) for line in config["process"]["env"] if "=" in line)
    asked = environment.get("NVIDIA_VISIBLE_DEVICES", "")
    said = {"id": state["id"], "devices": asked}
    unknown = [one for one in asked.split(",") if one not in known()]
    if unknown:
        said["error"] = f"nvidia-container-cli: device error: {unknown[0]}: unknown device"
        print(said["error"], file=sys.stderr)
    elif asked not in ("", "void", "none") and os.environ.get("FAKE_NVML_LIB"):
        put_library(state, bundle, config)
    with Path(os.environ["FAKE_HOOK_LOG"]).open("a") as log:
        log.write(json.dumps(said) + "\n")
    return 1 if unknown else 0


def known() -> set[str]:
    return {"", "all", "void", "none", *os.environ["FAKE_GPUS"].split(",")}


def put_library(state: dict[str, Any], bundle: Path, config: dict[str, Any]) -> None:
    """Into the container's own mounts, before it is closed off."""
    inside = bundle / config["root"]["path"] / LIBRARY
    inside.parent.mkdir(parents=True, exist_ok=True)
    inside.touch()
    library = os.environ["FAKE_NVML_LIB"]
    into = ["nsenter", "-t", str(state["pid"]), "-m", "mount", "--bind", library, str(inside)]
    subprocess.run(into, check=True, capture_output=True)


if __name__ == "__main__":
    sys.exit(main())
