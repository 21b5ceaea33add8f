"""Stand-ins for the image engines, which are not to be had here: they read the real configuration, print
what the real ones print (sd-scripts 0.10, ai-toolkit 0.12) and write real weight files, in pieces as slow
disks do.
"""

from __future__ import annotations

import os
import stat
import textwrap
from pathlib import Path

#: In the last byte but one of the last file; of others the epoch or the step.
LAST_MARKER = 255

COMMON = """
import json, math, os, re, struct, sys, time

STEP_S = float(os.environ.get("STAND_IN_STEP_S", "0.01"))
#: Where to wait until it is killed, and the file that says that it waits.
GATE, READY = os.environ.get("STAND_IN_GATE", ""), os.environ.get("STAND_IN_READY", "")
FAULT = os.environ.get("STAND_IN_FAULT", "")


#: A module of each family, as the real engines name it.
KOHYA = {"sdxl": "lora_unet_input_blocks_4_1_proj_in", "flux": "lora_unet_double_blocks_0_img_attn_qkv"}
TOOLKIT = {
    "flux": "transformer.transformer_blocks.0.attn.to_q",
    "zimage": "diffusion_model.layers.0.attention.to_q",
    "qwen_image": "diffusion_model.transformer_blocks.0.attn.to_q",
    "ideogram4": "diffusion_model.layers.0.attention.qkv",
    "krea2": "diffusion_model.blocks.0.attn.wq",
}


def wait_at(place):
    launch = re.search(r"launch-[0-9]+", " ".join(sys.argv))
    if f"{launch[0]} {place}" == GATE:
        with open(READY, "w") as file:
            file.write(GATE)
        time.sleep(3600)


def weights(path, module, marker):
    # `marker` is the last byte but one.
    down, up = ("down", "up") if module.startswith("lora_") else ("A", "B")
    entry = {
        f"{module}.lora_{down}.weight": {"dtype": "BF16", "shape": [2048], "data_offsets": [0, 4096]},
        f"{module}.lora_{up}.weight": {"dtype": "BF16", "shape": [2048], "data_offsets": [4096, 8192]},
    }
    head = json.dumps(entry).encode()
    numbers = bytes([marker % 256, 0x3C]) * 2048
    trained = bytes(4096) if FAULT == "zero" else numbers
    data = struct.pack("<Q", len(head)) + head + numbers + trained
    with open(path, "wb") as file:
        for start in range(0, len(data), 2000):
            file.write(data[start : start + 2000])
            file.flush()
            time.sleep(0.002)
            wait_at(f"save {os.path.basename(path)}")


def bar(name, step, total, began, extra):
    took = time.time() - began
    left = took / max(step, 1) * (total - step)
    clock = lambda seconds: f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"
    share = int(100 * step / total)
    text = f"{name}: {share:3d}%|{'#' * (share // 10):10}| {step}/{total} [{clock(took)}<{clock(left)}, "
    sys.stderr.write(f"\\r{text} {took / max(step, 1):.2f}s/it, {extra}]")
    sys.stderr.flush()


def trouble(step, total):
    wait_at(f"step {step}")
    if FAULT == "oom" and step == 3:
        raise RuntimeError("CUDA out of memory. Tried to allocate 4.00 GiB.")
    if FAULT == "disk" and step == 3:
        raise OSError(28, "No space left on device")
    if FAULT == "crash" and step == 3:
        raise KeyError("down_blocks")
    return float("nan") if FAULT == "nan" and step > 30 else 1 / (1 + step)
"""

#: Imports a package beside itself, as sd-scripts does.
KOHYA = """
import argparse, glob, tomllib

import library

parser = argparse.ArgumentParser()
parser.add_argument("--config_file", required=True)
with open(parser.parse_args().config_file, "rb") as file:
    config = tomllib.load(file)
folders = glob.glob(config["train_data_dir"] + "/*_*")
pictures = [one for folder in folders for one in glob.glob(folder + "/*.png")]
if not pictures or FAULT == "no data":
    print("No data found. Please verify arguments (train_data_dir must be the parent of folders with images)")
    sys.exit(0)
repeats = int(os.path.basename(folders[0]).split("_")[0])
total, batch = config["max_train_steps"], config["train_batch_size"]
per_epoch = math.ceil(len(pictures) * repeats / batch)
print("prepare tokenizers\\ncaching latents...")
for at in range(len(pictures)):
    share = 100 * (at + 1) // len(pictures)
    sys.stderr.write(f"\\r{share}%|###| {at + 1}/{len(pictures)} [00:00<00:00, 9it/s]")
print("running training / 学習開始")
output, began = config["output_dir"], time.time()
os.makedirs(output, exist_ok=True)
module = KOHYA[os.path.basename(sys.argv[0]).split("_")[0]]
for step in range(1, total + 1):
    time.sleep(STEP_S)
    loss = trouble(step, total)
    bar("steps", step, total, began, f"avr_loss={loss:.3g}")
    epoch = step // per_epoch
    if step % per_epoch == 0 and epoch % config["save_every_n_epochs"] == 0 and step < total:
        name = f"{config['output_name']}-{epoch:06d}.safetensors"
        weights(os.path.join(output, name), module, epoch)
weights(os.path.join(output, f"{config['output_name']}.safetensors"), module, 255)
print("\\nmodel saved.")
"""

TOOLKIT = """
import yaml

with open(sys.argv[1]) as file:
    config = yaml.safe_load(file)["config"]
process = config["process"][0]
assert os.listdir(process["datasets"][0]["folder_path"])
total, every = process["train"]["steps"], process["save"]["save_every"]
folder = os.path.join(process["training_folder"], config["name"])
os.makedirs(folder, exist_ok=True)
print("Running 1 process\\nLoading model")
began = time.time()
module = TOOLKIT[process["model"]["arch"].split(":")[0]]
for step in range(1, total + 1):
    time.sleep(STEP_S)
    loss = trouble(step, total)
    bar(config["name"], step, total, began, f"lr: 1.0e-04 loss: {loss:.3e}")
    if step % every == 0 and step < total:
        weights(os.path.join(folder, f"{config['name']}_{step:09d}.safetensors"), module, step)
weights(os.path.join(folder, config["name"] + ".safetensors"), module, 255)
"""

PYTHON = """#!/bin/sh
exec {python} "$@"
"""

#: Runs the script that it is to launch; its own flags change nothing here.
ACCELERATE = """#!/bin/sh
shift
while [ "${1#--}" != "$1" ]; do
    case "$1" in --multi_gpu) shift ;; *) shift 2 ;; esac
done
exec python "$@"
"""


def lay_out(folder: Path, python: str) -> dict[str, str]:
    """The engines below `folder`: the environment in which they are found."""
    kohya, toolkit, programs = folder / "sd-scripts", folder / "ai-toolkit", folder / "bin"
    for one in (kohya, toolkit, programs):
        one.mkdir(parents=True)
    for name in ("sdxl_train_network.py", "flux_train_network.py"):
        (kohya / name).write_text(textwrap.dedent(COMMON + KOHYA), encoding="utf-8")
    (kohya / "library").mkdir()
    (kohya / "library" / "__init__.py").touch()
    (toolkit / "run.py").write_text(textwrap.dedent(COMMON + TOOLKIT), encoding="utf-8")
    wrapper = PYTHON.format(python=python)
    for name, text in (("accelerate", ACCELERATE), ("python", wrapper)):
        (programs / name).write_text(text, encoding="utf-8")
        (programs / name).chmod((programs / name).stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    return {
        "GOD_MINER_KOHYA": str(kohya),
        "GOD_MINER_AI_TOOLKIT": str(toolkit),
        "GOD_MINER_ENGINE_PYTHON": "python",
        "PATH": f"{programs}:{os.environ['PATH']}",
    }
