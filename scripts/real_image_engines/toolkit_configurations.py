"""Read every configuration for ai-toolkit in its own code, and train a small model with it for some steps.

    TOOLKIT_PYTHON toolkit_configurations.py CONFIGURATIONS AI_TOOLKIT MODELS PICTURES STEPS

Every key is looked up in the classes that read it: ai-toolkit ignores unknown ones. Then its process is made
of it, with optimizer and schedule. STEPS of 0 end here.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any

import yaml
from each import keys_of_adapter, run_each

#: Sections of a process, and the class in `toolkit.config_modules` that each becomes.
SECTIONS = {"network": "NetworkConfig", "save": "SaveConfig", "train": "TrainConfig", "model": "ModelConfig"}
SECTIONS |= {"logging": "LoggingConfig", "datasets": "DatasetConfig"}
#: Read by the process itself.
_PROCESS = {"type", "training_folder", "trigger_word", "training_seed", *SECTIONS}
_READ = re.compile(
    r"kwargs\.(?:get|pop)\(\s*['\"](\w+)['\"]|['\"](\w+)['\"] in kwargs|kwargs\[['\"](\w+)['\"]\]"
)


def known_keys(source: str) -> set[str]:
    """The keys that the source of a constructor takes out of its `kwargs`."""
    return {next(filter(None, match)) for match in _READ.findall(source)}


def check_keys(process: dict[str, Any], config_modules: Any) -> None:
    unknown = sorted(process.keys() - _PROCESS)
    for section, name in SECTIONS.items():
        known = known_keys(inspect.getsource(getattr(config_modules, name).__init__))
        values = process[section] if section == "datasets" else [process.get(section) or {}]
        unknown += [f"{section}.{key}" for value in values for key in value.keys() - known]
    if unknown:
        raise ValueError(f"unknown keys: {', '.join(unknown)}")


def main(configurations: str, toolkit: str, models: str, pictures: str, steps: str) -> int:
    sys.path.insert(0, toolkit)
    os.chdir(toolkit)
    import torch
    from toolkit import config_modules
    from toolkit.extension import get_all_extensions_process_dict
    from toolkit.job import get_job
    from toolkit.optimizer import get_optimizer
    from toolkit.scheduler import get_lr_scheduler

    # Before the first fork, and with the module of the trainer itself.
    get_all_extensions_process_dict()

    def attempt(folder: Path, case: dict[str, Any], scratch: Path) -> str:
        config = yaml.safe_load((folder / case["file"]).read_text("utf-8"))
        (process,) = config["config"]["process"]
        check_keys(process, config_modules)
        left_out = _made_small(process, case["family"], Path(models), pictures, scratch)
        process["train"]["steps"] = int(steps) or process["train"]["steps"]
        path = scratch / "config.yaml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        job = get_job(str(path))
        if steps == "0":
            train = job.process[0].train_config
            weights = [torch.nn.Parameter(torch.zeros(8, 8))]
            optimizer = get_optimizer(weights, train.optimizer, train.lr, train.optimizer_params)
            # As the process itself calls it.
            every = {"total_iters": train.steps, **train.lr_scheduler_params}
            schedule = get_lr_scheduler(train.lr_scheduler, optimizer, **every)
            return f"{type(optimizer).__name__}, {type(schedule).__name__}"
        job.run()
        job.cleanup()
        file = scratch / "output" / config["config"]["name"] / f"{config['config']['name']}.safetensors"
        said = ", ".join(sorted(keys_of_adapter(file)))
        return f"{said}{'; not on a CPU: ' + ', '.join(left_out) if left_out else ''}"

    return run_each("ai-toolkit", Path(configurations), attempt)


def _made_small(
    process: dict[str, Any], family: str, models: Path, pictures: str, scratch: Path
) -> list[str]:
    """Put the small model and two steps in place; return what a CPU cannot do."""
    hub, folder = models / family / "hf_cache", models / family / "models" / f"tiny--{family}"
    model = process["model"]
    process["training_folder"] = str(scratch / "output")
    for dataset in process["datasets"]:
        dataset["folder_path"] = pictures
        dataset["resolution"] = [64 + 32 * at for at, _ in enumerate(dataset["resolution"])]
    model["name_or_path"] = str(folder)
    paths = model.get("model_kwargs") or {}
    for key, place in (("text_encoder_path", next(hub.glob("Qwen--*"), None)), ("vae_path", folder)):
        if key in paths:
            paths[key] = str(place)
    for key in ("assistant_lora_path", "unconditional_lora_path"):
        if model.get(key):
            model[key] = str(next(hub.glob("*.safetensors")))
    left_out = []
    if model.pop("compile", None):
        left_out.append("compile")
    if "|" in str(model.get("qtype")):
        model["qtype"] = "uint3"
        left_out.append("recovery adapter")
    return left_out


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
