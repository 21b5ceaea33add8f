"""Ask the installed Axolotl about configurations.

The tests import `complaints`, which has the training environment's python run this same file by its path.
Nothing is downloaded, no model is opened and no GPU is needed: Axolotl's own check takes an assumed machine.
"""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

Values = Mapping[str, Any]

#: The machine to assume, as far as a test says nothing else: Axolotl's checks depend on GPUs and kernels.
MACHINE = {"n_gpu": 4, "n_node": 1, "compute_capability": "sm_90", "bf16": True, "tf32": True, "fp8": True}
TORCH = "2.13.0"
QUIET = {
    "AXOLOTL_DO_NOT_TRACK": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "DO_NOT_TRACK": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
}


def complaints(python: str, requests: Sequence[tuple[Values, Values]]) -> list[list[str]]:
    """What Axolotl refuses in each configuration, for each machine, and the keys that it silently drops.

    All in one process, because importing Axolotl takes seconds and a check a few milliseconds.
    """
    done = subprocess.run(
        # -P: modules beside this file must not be what its imports find.
        [python, "-P", __file__],
        input=json.dumps(requests),
        capture_output=True,
        text=True,
        timeout=800,
        env={**os.environ, **QUIET},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers: list[list[str]] = json.loads(done.stdout)
    return answers


def check(config: Values, machine: Values) -> list[str]:
    from axolotl.integrations.base import PluginManager
    from axolotl.utils.config import prepare_plugins, validate_config
    from axolotl.utils.dict import DictDefault

    # It outlives a configuration, and every plugin that it ever saw adds its keys.
    PluginManager.get_instance().plugins.clear()
    loaded = DictDefault(copy.deepcopy(dict(config)))
    try:
        prepare_plugins(loaded)
        capabilities = {"capabilities": {**MACHINE, **machine}, "env_capabilities": {"torch_version": TORCH}}
        checked = validate_config(loaded, **capabilities)
    except Exception as error:  # the engine's checks raise anything, even warnings
        return [f"{type(error).__name__}: {error}"[:400]]
    return dropped(config, json.loads(json.dumps(checked, default=str)))


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


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    with contextlib.redirect_stdout(sys.stderr):  # the engine greets on standard output
        results = [check(*request) for request in json.load(sys.stdin)]
    json.dump(results, sys.stdout)
