"""Is this configuration one that its engine will run as written?

Two answers. `validate` is pure and takes a millisecond: keys and types against the checked-in table, then
the rules of what the engine would swallow. `validate_with_engine` asks Axolotl itself, in the training
environment, pretending GPUs that need not be there.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.choices import Engine
from core.errors import GodMinerError, Problem
from core.recipes.rules import ai_toolkit, axolotl, kohya
from core.recipes.rules.common import secrets
from core.recipes.schema import check, table

Config = Mapping[str, Any]

#: The first configuration costs the import of Axolotl, seconds when idle and far more on a busy machine.
ENGINE_TIMEOUT_S = 300.0

_CHECKER = Path(__file__).with_name("engine_check.py")


def validate(engine: Engine, config: Config, *, gpus: int, flux: bool = False) -> list[Problem]:
    """Every problem found; `flux` tells kohya's two trainers apart."""
    if engine is Engine.AXOLOTL:
        known = axolotl.known_keys(config)
        found = check(known, known.facts["root"], config, axolotl.HINTS)
        found += _unless_broken(found, axolotl.rules(config, gpus))
    elif engine is Engine.KOHYA:
        root = table(engine).facts["roots"]["flux" if flux else "sdxl"]
        found = check(table(engine), root, config, kohya.HINTS)
        found += _unless_broken(found, kohya.rules(config, gpus, flux))
    elif engine is Engine.AI_TOOLKIT:
        found = check(table(engine), table(engine).facts["root"], config, ai_toolkit.HINTS)
        found += _unless_broken(found, ai_toolkit.rules(config, gpus))
    else:
        raise ValueError(f"{engine} has no configuration of its own: the native trainer reads the plan")
    return [*found, *secrets(config)]


def _unless_broken(found: list[Problem], more: Iterable[Problem]) -> list[Problem]:
    """Rules may lean on right types, so a value of a wrong one ends the list instead of a traceback."""
    try:
        return list(more)
    except (TypeError, ValueError, AttributeError, KeyError, ZeroDivisionError):
        if not found:
            raise
        return []


@dataclass(frozen=True)
class EngineFinding:
    """What Axolotl itself said of one configuration."""

    errors: tuple[str, ...]
    #: Keys that it took and dropped.
    dropped: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.errors and not self.dropped


@dataclass(frozen=True)
class Pretended:
    """The machine that the engine is to believe in: its answers depend on cards and kernels."""

    gpus: int = 4
    compute_capability: str = "sm_90"
    bf16: bool = True
    tf32: bool = True
    fp8: bool = True
    torch_version: str = "2.11.0"


class EngineCheckError(GodMinerError):
    """The engine could not be asked, which says nothing about the configuration."""

    code = "engine_check_failed"


def validate_with_engine(
    python: str | Path,
    configs: Sequence[tuple[Config, Pretended]],
    timeout_s: float = ENGINE_TIMEOUT_S,
    environment: Mapping[str, str] | None = None,
) -> list[EngineFinding]:
    """Axolotl's own verdict on each configuration, all in one process of the training environment.

    `python` is that environment's interpreter. One process, because importing Axolotl costs seconds and a
    verdict a few milliseconds.
    """
    asked = [{"config": config, "machine": vars(machine)} for config, machine in configs]
    try:
        done = subprocess.run(
            # -P: this script's folder holds an axolotl.py, which must not be what `import axolotl` finds.
            [str(python), "-P", str(_CHECKER)],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=dict(environment) if environment is not None else None,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as reason:
        raise EngineCheckError(f"{python} could not check {len(asked)} configurations: {reason}") from reason
    if done.returncode:
        tail = done.stderr.strip().splitlines()[-1:] or ["no word of why"]
        raise EngineCheckError(f"{python} ended with {done.returncode} instead of a verdict: {tail[0]}")
    return [
        EngineFinding(**{key: tuple(value) for key, value in one.items()}) for one in json.loads(done.stdout)
    ]
