"""Say what this environment can train with: python -m trainer.runner.check_engines text|image|toolkit [gpu]

Prints one JSON object: each engine of that image, and what it lacks ("" for nothing). With `gpu`,
one that CUDA cannot use counts as lacking. The daemon runs it as a training before it accepts work; the
Dockerfiles import it as their last check.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable

from core.domain.choices import Engine
from trainer.runner.image_runner import PYTHON_VARIABLE, engine_directory

#: Imported, which takes a few seconds; the others are only searched for, which shows what is missing.
LOADED = ("torch", "accelerate", "pydantic", "yaml", "trainer.text", "trainer.runner.prepare")
NATIVE = ("transformers", "tokenizers", "safetensors", "jinja2")
AXOLOTL = (*NATIVE, "datasets", "peft", "trl", "axolotl")
SCRIPTS = {Engine.KOHYA: "sdxl_train_network.py", Engine.AI_TOOLKIT: "run.py"}
ENGINE_PYTHON_S = 120.0
NO_GPU = "a GPU was given, and torch finds none: see the driver, gres.conf, and whether torch is for CUDA"


def missing_packages(image: str, with_gpu: bool = False) -> dict[Engine, str]:
    """By engine of this image: what is missing, or "" where everything is there."""
    missing = _CHECKS[image]()
    return {engine: why or (_gpu_problem() if with_gpu else "") for engine, why in missing.items()}


def _text() -> dict[Engine, str]:
    unloadable = _first(map(_unloadable, LOADED))
    return {
        engine: unloadable
        or ", ".join(f"no {name}" for name in names if importlib.util.find_spec(name) is None)
        for engine, names in ((Engine.AXOLOTL, AXOLOTL), (Engine.NATIVE, NATIVE))
    }


def _first(problems: Iterable[str]) -> str:
    return next(filter(None, problems), "")


def _unloadable(name: str) -> str:
    try:
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - whatever a broken installation raises
        return f"{name}: {type(error).__name__}: {error}"
    return ""


def _gpu_problem() -> str:
    """A job may be given a GPU that CUDA cannot use: by its driver, its device files, or torch's build."""
    return "" if importlib.import_module("torch").cuda.is_available() else NO_GPU


def _images(engine: Engine) -> dict[Engine, str]:
    script = engine_directory(engine) / SCRIPTS[engine]
    if not script.is_file():
        return {engine: f"no {script}"}
    problem = _first(map(_unloadable, ("pydantic", "yaml", "trainer.image")))
    return {engine: problem or _engine_python_problem()}


def _engine_python_problem() -> str:
    """Image engines have a Python of their own."""
    python = os.environ.get(PYTHON_VARIABLE, "python")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    try:
        subprocess.run(
            [python, "-c", "import torch"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=ENGINE_PYTHON_S,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        return f"{python}: {error.stderr.strip()[-300:]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{python}: {error}"
    return ""


_CHECKS: dict[str, Callable[[], dict[Engine, str]]] = {
    "text": _text,
    "image": lambda: _images(Engine.KOHYA),
    "toolkit": lambda: _images(Engine.AI_TOOLKIT),
}


def main(image: str, *more: str) -> int:
    missing = missing_packages(image, with_gpu="gpu" in more)
    sys.stdout.write(f"{json.dumps(missing)}\n")
    return 0 if not all(missing.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
