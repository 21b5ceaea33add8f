"""Questions to the installed Axolotl, in a fork of the process that has imported it.

Nothing is downloaded, no model is opened and no GPU is needed: Axolotl's own check takes an assumed machine.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.core.recipes.cases import TORCH
from tests.trainer.forks import ROOT, ForkServer

Values = Mapping[str, Any]

#: The machine to assume, as far as a test says nothing else: Axolotl's checks depend on GPUs and kernels.
MACHINE = {"n_gpu": 4, "n_node": 1, "compute_capability": "sm_90", "bf16": True, "tf32": True, "fp8": True}
TABLE_SCRIPT = ROOT / "scripts" / "engine_tables" / "axolotl_table.py"


def answered(forks: ForkServer, folder: Path, question: str, requests: object = None) -> Any:
    (folder / "requests.json").write_text(json.dumps(requests))
    command = ("-m", __name__, question, str(folder))
    code, said = forks.run(command, {**os.environ, "PYTHONPATH": str(ROOT)}, folder)
    assert code == 0, said[-3000:]
    return json.loads((folder / "answers.json").read_text())


def complaints(forks: ForkServer, folder: Path, requests: Sequence[tuple[Values, Values]]) -> list[list[str]]:
    """What Axolotl refuses in each configuration, for each machine, and the keys that it silently drops."""
    answers: list[list[str]] = answered(forks, folder, "complaints", requests)
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


def main(question: str, folder: str) -> None:
    logging.disable(logging.CRITICAL)
    place = Path(folder)
    answers: Any
    if question == "table":
        sys.path.insert(0, str(TABLE_SCRIPT.parent))
        answers = runpy.run_path(str(TABLE_SCRIPT))["table"]()
    else:
        answers = [check(*request) for request in json.loads((place / "requests.json").read_text())]
    (place / "answers.json").write_text(json.dumps(answers))
