"""Ask Axolotl itself about configurations: JSON in, JSON out. Runs in the training environment, by path.

    PYTHON -P engine_check.py < [{"config": {...}, "machine": {"gpus": 4, ...}}, ...]

prints [{"errors": [...], "dropped": [...], "warnings": [...]}, ...]. Nothing is downloaded, no model is
opened and no GPU is needed: the machine is pretended, as `validate_config` allows. It imports nothing of
this project, so that it runs in any environment with Axolotl; and the engine by name, so that nothing in
`core` depends on it.
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

#: Set before Axolotl is imported: no network, no telemetry, and no GPU to be looked at.
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


class Collector(logging.Handler):
    """The engine says much of what it changes only in its log."""

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


def dropped(given: object, kept: object, path: str = "") -> list[str]:
    """Every key of `given` that is not in `kept`, at any depth."""
    if isinstance(given, list) and isinstance(kept, list):
        items = enumerate(zip(given, kept, strict=False))
        pairs = [(f"{path}[{place}]", one, other) for place, (one, other) in items]
    elif isinstance(given, dict) and isinstance(kept, dict):
        set_keys = {key: value for key, value in given.items() if value is not None}
        lost = [f"{path}.{key}".lstrip(".") for key in set_keys if key not in kept]
        pairs = [
            (f"{path}.{key}".lstrip("."), value, kept[key]) for key, value in set_keys.items() if key in kept
        ]
        return lost + [key for pair in pairs for key in dropped(pair[1], pair[2], pair[0])]
    else:
        return []
    return [key for where, one, other in pairs for key in dropped(one, other, where)]


def messages(reason: Exception) -> list[str]:
    if not isinstance(reason, ValidationError):  # some checks raise plain errors, even DeprecationWarning
        return [f"{type(reason).__name__}: {reason}"[:LONGEST_MESSAGE]]
    details = reason.errors(include_url=False, include_context=False, include_input=False)
    return [
        f"{'.'.join(map(str, one['loc']))}: {one['msg']}".lstrip(": ")[:LONGEST_MESSAGE] for one in details
    ]


def verdict(config: Values, machine: Values) -> Values:
    collector = Collector()
    logger = logging.getLogger("axolotl")
    logger.addHandler(collector)
    try:
        kept = validated(config, machine)
    except Exception as reason:  # noqa: BLE001 - the engine's checks raise what they like; each is a verdict
        return {"errors": messages(reason), "dropped": [], "warnings": collector.messages}
    finally:
        logger.removeHandler(collector)
    return {"errors": [], "dropped": dropped(config, kept), "warnings": collector.messages}


def main() -> None:
    asked = json.load(sys.stdin)
    os.environ.update(QUIET)
    with contextlib.redirect_stdout(sys.stderr):  # the engine greets on standard output
        importlib.import_module(ENGINE)  # here, so that its absence is no verdict on a configuration
        answers = [verdict(one["config"], one["machine"]) for one in asked]
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
