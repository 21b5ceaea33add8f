"""Check that an engine will run a configuration as written.

`validate` is pure and takes a millisecond: keys and types against the checked-in table, then the rules for
what the engine would silently accept. `validate_with_engine` asks Axolotl itself, in the training
environment, with GPUs that need not exist.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from core.domain.choices import Engine
from core.domain.errors import GodMinerError, Problem
from core.engines.ai_toolkit import rules as ai_toolkit_rules
from core.engines.axolotl import rules as axolotl_rules
from core.engines.kohya import rules as kohya_rules
from core.engines.schema import ConfigMapping, check_keys, engine_table, find_secrets

#: The first configuration costs the import of Axolotl, seconds when idle and far more on a busy machine.
ENGINE_TIMEOUT_S = 300.0

_CHECKER = Path(__file__).parent / "axolotl" / "engine_check.py"


def validate(engine: Engine, config: ConfigMapping, *, gpus: int, flux: bool = False) -> list[Problem]:
    """Find every problem; `flux` tells kohya's two trainers apart."""
    if engine is Engine.AXOLOTL:
        table = axolotl_rules.axolotl_table(config)
        problems = check_keys(table, table.facts["root"], config, axolotl_rules.AXOLOTL_HINTS)
        problems += _rule_problems(problems, axolotl_rules.axolotl_rules(config, gpus))
    elif engine is Engine.KOHYA:
        table = engine_table(engine)
        root = table.facts["roots"]["flux" if flux else "sdxl"]
        problems = check_keys(table, root, config, kohya_rules.KOHYA_HINTS)
        problems += _rule_problems(problems, kohya_rules.kohya_rules(config, gpus, flux))
    elif engine is Engine.AI_TOOLKIT:
        table = engine_table(engine)
        problems = check_keys(table, table.facts["root"], config, ai_toolkit_rules.AI_TOOLKIT_HINTS)
        problems += _rule_problems(problems, ai_toolkit_rules.ai_toolkit_rules(config, gpus))
    else:
        raise ValueError(f"{engine} has no configuration of its own: the native trainer reads the plan")
    return [*problems, *find_secrets(config)]


def _rule_problems(known: list[Problem], rules: Iterable[Problem]) -> list[Problem]:
    """Rules rely on correct types: after a wrong one they may fail, and the known problems must do."""
    try:
        return list(rules)
    except (TypeError, ValueError, AttributeError, KeyError, ZeroDivisionError):
        if not known:
            raise
        return []


@dataclass(frozen=True)
class EngineFinding:
    """Axolotl's own result for one configuration."""

    errors: tuple[str, ...]
    #: Keys that it accepted and dropped.
    dropped: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.errors and not self.dropped


@dataclass(frozen=True)
class AssumedMachine:
    """The machine that Axolotl is told to assume: its checks depend on GPUs and kernels."""

    gpus: int = 4
    compute_capability: str = "sm_90"
    bf16: bool = True
    tf32: bool = True
    fp8: bool = True
    torch_version: str = "2.13.0"


class EngineCheckError(GodMinerError):
    """Axolotl could not be run, which says nothing about the configuration."""

    code = "engine_check_failed"


def validate_with_engine(
    python: str | Path,
    configs: Sequence[tuple[ConfigMapping, AssumedMachine]],
    timeout_s: float = ENGINE_TIMEOUT_S,
    environment: Mapping[str, str] | None = None,
) -> list[EngineFinding]:
    """Let Axolotl itself check each configuration, all in one process of the training environment.

    `python` is that environment's interpreter. One process, because importing Axolotl takes seconds and a
    check a few milliseconds.
    """
    requests = [{"config": config, "machine": vars(machine)} for config, machine in configs]
    try:
        done = subprocess.run(
            # -P: modules beside this script must not be what its imports find.
            [str(python), "-P", str(_CHECKER)],
            input=json.dumps(requests),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env=dict(environment) if environment is not None else None,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as reason:
        raise EngineCheckError(
            f"{python} could not check {len(requests)} configurations: {reason}"
        ) from reason
    if done.returncode:
        tail = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise EngineCheckError(f"{python} ended with {done.returncode} instead of a result: {tail[0]}")
    results = json.loads(done.stdout)
    return [EngineFinding(**{key: tuple(value) for key, value in result.items()}) for result in results]
