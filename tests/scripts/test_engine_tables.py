"""The scripts that make the key tables, on a small stand-in for each engine's source."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.core.submission.folders import write

pytestmark = pytest.mark.process


SCRIPTS = Path(__file__).parents[2] / "scripts" / "engine_tables"


def printed(script: str, checkout: Path) -> str:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / script), str(checkout)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "ENGINE_COMMIT": "abc123"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


KOHYA = {
    "library/__init__.py": "",
    "library/train_util.py": """
import torch_of_no_machine as torch
from diffusers_of_no_machine import Anything, Optional
class Data(torch.utils.data.Dataset):
    @torch.no_grad()
    def item(self, x: torch.Tensor | None = None): return x
def add(parser, with_more):
    parser.add_argument("--network_dim", type=int)
    parser.add_argument("--loss_type", type=str, choices=["l1", "l2", None])
    parser.add_argument("--flag", action="store_true")
    parser.add_argument("--names", nargs="*", type=str)
    if with_more:
        parser.add_argument("--rate", type=float, default=1e-4)
def get_optimizer(optimizer_type):
    if optimizer_type == "AdamW".lower(): return 1
    elif optimizer_type == "Lion8bit".lower(): return 2
def get_scheduler_fix(name):
    if name == SchedulerType.COSINE: return 1
""",
    **{
        f"{name}_train_network.py": f"""
import argparse
from library import train_util
def setup_parser():
    parser = argparse.ArgumentParser()
    train_util.add(parser, {name == "flux"})
    return parser
"""
        for name in ("sdxl", "flux")
    },
}


def test_the_parsers_of_sd_scripts_run_without_what_they_import(tmp_path: Path) -> None:
    text = printed("kohya_table.py", write(tmp_path, KOHYA))
    assert '\n   "network_dim": ["int"]\n' in text, "one key per line"
    table = json.loads(text)
    assert table["version"] == "abc123"
    assert table["objects"]["sdxl_train_network"] == {
        "flag": ["bool"],
        "loss_type": [{"choices": ["l1", "l2"]}],
        "names": [{"list": ["str"]}],
        "network_dim": ["int"],
    }
    assert table["objects"]["flux_train_network"]["rate"] == ["float"]
    assert table["optimizers"] == ["adamw", "lion8bit"]
    assert table["schedulers"] == ["cosine"]


AI_TOOLKIT = {
    "version.py": 'VERSION = "1.2.3"',
    "toolkit/config_modules.py": """
SaveFormat = Literal['safetensors', 'diffusers']
class SaveConfig:
    def __init__(self, **kwargs):
        self.save_every: int = kwargs.get('save_every', 1000)
        self.save_format: SaveFormat = kwargs.get('save_format', 'safetensors')
class TrainConfig:
    def __init__(self, **kwargs):
        self.lr = kwargs.get('lr', 1e-6)
        self.path: str = kwargs.get('path', None)
        self.other = kwargs.get(computed, 1)
class NetworkConfig:
    def __init__(self, **kwargs):
        rank = kwargs.get('rank', None)
class ModelConfig:
    def __init__(self, **kwargs):
        if self.arch == 'sd2': pass
class DatasetConfig: pass
class SampleConfig: pass
class LoggingConfig: pass
class EMAConfig: pass
class SampleItem: pass
class Unrelated:
    def __init__(self, **kwargs):
        self.x = kwargs.get('x', 1)
""",
    "toolkit/optimizer.py": "if lower_type == 'adamw8bit': pass\nelif lower_type.startswith('prodigy'): pass",
    "toolkit/scheduler.py": 'if name == "cosine": pass',
    "jobs/process/BaseProcess.py": "every = self.get_conf('every', 0)",
    "jobs/process/BaseTrainProcess.py": "",
    "jobs/process/BaseSDTrainProcess.py": "x = self.get_conf('network', None)",
    "extensions_built_in/sd_trainer/DiffusionTrainer.py": 'x = self.config.get("db", "./a.db")',
    "extensions_built_in/diffusion_models/krea2/krea2.py": """
class Krea:
    arch = "krea2"
    def f(self):
        return int(self.model_config.model_kwargs.get("max_text_length", 512))
""",
    **{
        f"extensions_built_in/diffusion_models/{name}/{name}.py": ""
        for name in ("ideogram4", "qwen_image", "z_image")
    },
}


def test_the_keys_of_ai_toolkit_are_read_from_its_source(tmp_path: Path) -> None:
    table = json.loads(printed("ai_toolkit_table.py", write(tmp_path, AI_TOOLKIT)))
    objects = table["objects"]
    assert table["version"] == "1.2.3 abc123"
    assert objects["SaveConfig"] == {
        "save_every": ["int"],
        "save_format": [{"choices": ["diffusers", "safetensors"]}],
    }
    assert objects["TrainConfig"] == {"lr": ["float"], "path": ["str", "null"]}
    assert objects["model_kwargs"] == {"max_text_length": ["int"]}
    assert {"every", "db", "network", "type"} <= objects["process"].keys()
    assert "Unrelated" not in objects
    assert {"krea2", "sd2"} <= set(table["architectures"])
    assert table["optimizers"] == ["adamw8bit", "prodigy"]
    assert table["schedulers"] == ["cosine"]
