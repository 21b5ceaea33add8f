"""Ask Axolotl itself about configurations: JSON in, JSON out. Runs in the training environment, by path.

    PYTHON -P engine_check.py < [{"config": {...}, "machine": {"gpus": 4, ...}}, ...]

prints [{"errors": [...], "dropped": [...], "warnings": [...]}, ...]. Nothing is downloaded, no model is
opened and no GPU is needed: `validate_config` accepts an assumed machine. It imports nothing of this
project, so that it runs in any environment with Axolotl; and the engine by name, so that nothing in `core`
depends on it.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import logging
import os
import sys
from typing import Any

from pydantic import ValidationError

#: Set before Axolotl is imported: no network, no telemetry, no GPU.
QUIET = {
    "AXOLOTL_DO_NOT_TRACK": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "DO_NOT_TRACK": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}
LONGEST_MESSAGE = 400
ENGINE = "axolotl.utils.config"

Values = dict[str, Any]


class LogCollector(logging.Handler):
    """Many changes are only in the engine's log."""

    def __init__(self) -> None:
        super().__init__(level=logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage()[:LONGEST_MESSAGE])


def capabilities(machine: Values) -> tuple[Values, Values]:
    gpu = {
        "bf16": machine["bf16"],
        "tf32": machine["tf32"],
        "fp8": machine["fp8"],
        "n_gpu": machine["gpus"],
        "n_node": 1,
        "compute_capability": machine["compute_capability"],
    }
    return gpu, {"torch_version": machine["torch_version"]}


def forget_plugins() -> None:
    """The plugin manager outlives a configuration, and every plugin it ever saw adds its keys."""
    importlib.import_module("axolotl.integrations.base").PluginManager.get_instance().plugins.clear()


def validated(config: Values, machine: Values) -> Any:
    engine = importlib.import_module(ENGINE)
    forget_plugins()
    loaded = importlib.import_module("axolotl.utils.dict").DictDefault(copy.deepcopy(config))
    engine.prepare_plugins(loaded)
    gpu, environment = capabilities(machine)
    checked = engine.validate_config(loaded, capabilities=gpu, env_capabilities=environment)
    return json.loads(json.dumps(checked, default=str))


def dropped(given: object, checked: object, path: str = "") -> list[str]:
    """Every key of `given` that is not in `checked`, at any depth."""
    if isinstance(given, list) and isinstance(checked, list):
        pairs = enumerate(zip(given, checked, strict=False))
        return [key for index, (a, b) in pairs for key in dropped(a, b, f"{path}[{index}]")]
    if not isinstance(given, dict) or not isinstance(checked, dict):
        return []
    lost: list[str] = []
    for key, value in given.items():
        where = f"{path}.{key}".lstrip(".")
        if value is not None:
            lost += dropped(value, checked[key], where) if key in checked else [where]
    return lost


def messages(reason: Exception) -> list[str]:
    if not isinstance(reason, ValidationError):  # some checks raise plain errors, even DeprecationWarning
        return [f"{type(reason).__name__}: {reason}"[:LONGEST_MESSAGE]]
    details = reason.errors(include_url=False, include_context=False, include_input=False)
    return [
        f"{'.'.join(map(str, error['loc']))}: {error['msg']}".lstrip(": ")[:LONGEST_MESSAGE]
        for error in details
    ]


def check(config: Values, machine: Values) -> Values:
    collector = LogCollector()
    logger = logging.getLogger("axolotl")
    logger.addHandler(collector)
    try:
        checked = validated(config, machine)
    except Exception as reason:  # noqa: BLE001 - the engine's checks raise anything; each is a result
        return {"errors": messages(reason), "dropped": [], "warnings": collector.messages}
    finally:
        logger.removeHandler(collector)
    return {"errors": [], "dropped": dropped(config, checked), "warnings": collector.messages}


def main() -> None:
    requests = json.load(sys.stdin)
    os.environ.update(QUIET)
    with contextlib.redirect_stdout(sys.stderr):  # the engine greets on standard output
        importlib.import_module(ENGINE)  # here, so that its absence is not taken for a result
        results = [check(request["config"], request["machine"]) for request in requests]
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
