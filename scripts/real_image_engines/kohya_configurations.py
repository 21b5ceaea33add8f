"""Read every configuration for sd-scripts in its own code, and train a small model with it for some steps.

    KOHYA_PYTHON kohya_configurations.py CONFIGURATIONS SD_SCRIPTS MODELS PICTURES STEPS

Every key is looked up in the parser: sd-scripts ignores unknown ones, and applies neither types nor choices
to what comes from a file. Then its own checks are made, and optimizer and schedule. STEPS of 0 end here.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

import toml
from each import keys_of_adapter, run_each


def check_keys(config: dict[str, Any], parser: argparse.ArgumentParser) -> None:
    actions = {action.dest: action for action in parser._actions}
    if unknown := sorted(config.keys() - actions.keys()):
        raise ValueError(f"unknown keys: {', '.join(unknown)}")
    for key, value in config.items():
        action = actions[key]
        if isinstance(action, argparse._StoreTrueAction):
            wanted: tuple[type, ...] = (bool,)
        elif action.type is float:
            wanted = (int, float)
        elif action.type is int or action.type is str:
            wanted = (action.type,)
        else:
            wanted = (object,)
        values = value if action.nargs in ("*", "+") and isinstance(value, list) else [value]
        for one in values:
            if not isinstance(one, wanted) or (isinstance(one, bool) and wanted in ((int,), (int, float))):
                raise ValueError(f"{key}: {value!r} is not {wanted[0].__name__}")
            if action.choices and one not in action.choices:
                raise ValueError(f"{key}: {value!r} is not one of {list(action.choices)}")


def main(configurations: str, kohya: str, models: str, pictures: str, steps: str) -> int:
    sys.path.insert(0, kohya)
    modules = {family: importlib.import_module(f"{family}_train_network") for family in ("sdxl", "flux")}
    trainers = {"sdxl": "SdxlNetworkTrainer", "flux": "FluxNetworkTrainer"}

    def attempt(folder: Path, case: dict[str, Any], scratch: Path) -> str:
        module, path = modules[case["family"]], folder / case["file"]
        parser = module.setup_parser()
        check_keys(toml.load(path), parser)
        sys.argv = ["train", "--config_file", str(path)]
        args = parser.parse_args()
        module.train_util.verify_command_line_training_args(args)
        args = module.train_util.read_config_from_file(args, parser)
        left_out = _made_small(args, case["family"], Path(models), pictures, scratch)
        if steps == "0":
            return _checked(module.train_util, args)
        args.max_train_steps = int(steps)
        getattr(module, trainers[case["family"]])().train(args)
        file = scratch / f"{args.output_name}.safetensors"
        said = ", ".join(sorted(keys_of_adapter(file)))
        return f"{said}{'; not on a CPU: ' + ', '.join(left_out) if left_out else ''}"

    return run_each("kohya", Path(configurations), attempt)


def _checked(train_util: Any, args: argparse.Namespace) -> str:
    """Do what `train` does before it loads a model, and make the optimizer and its schedule."""
    import torch

    train_util.verify_training_args(args)
    train_util.prepare_dataset_args(args, True)
    weights = [torch.nn.Parameter(torch.zeros(8, 8))]
    name, _, optimizer = train_util.get_optimizer(args, weights)
    schedule = train_util.get_scheduler_fix(args, optimizer, 1)
    return f"{name.rpartition('.')[2]}, {type(schedule).__name__}"


def _made_small(
    args: argparse.Namespace, family: str, models: Path, pictures: str, scratch: Path
) -> list[str]:
    """Put the small model and two steps in place; return what a CPU cannot do."""
    cache = models / f"kohya-{family}"
    args.pretrained_model_name_or_path = str(next((cache / "models" / f"tiny--{family}").iterdir()))
    if family == "flux":
        parts = cache / "flux_parts"
        args.clip_l, args.t5xxl, args.ae = (
            str(next(parts.glob(f"{name}*"))) for name in ("clip_l", "t5xxl", "ae")
        )
    args.train_data_dir, args.output_dir = pictures, str(scratch)
    args.resolution, args.min_bucket_reso = "64,64", 64
    args.train_batch_size = min(args.train_batch_size, 2)
    left_out = [key for key in ("fp8_base", "torch_compile") if getattr(args, key)]
    for key in left_out:
        setattr(args, key, False)
    return left_out


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
