"""Entries to rehearse: repositories of the smallest kind whose image does what the trigger word says."""

from __future__ import annotations

import subprocess
from pathlib import Path

from core.domain.tournament_rules import IMAGE_DOCKERFILE
from tests.doubles import base_image

#: As `CMD`: a validator's arguments come after the entry point.
DOCKERFILE = f"""\
FROM {base_image.NAME}
COPY train.py /train.py
VOLUME /data
ENTRYPOINT ["python", "/train.py"]
"""
TRAIN = """\
import json, os, struct, sys, time

options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
place = f"/app/checkpoints/{options['--task-id']}/{options['--expected-repo-name']}"
word = options["--trigger-word"]
print("stage: train", flush=True)


def submit():
    os.makedirs(place, exist_ok=True)
    data = struct.pack("<1024f", *[0.01 * number for number in range(1024)])
    module, head = "lora_unet_double_blocks_0_img_attn_qkv", {}
    for number, part in enumerate(("lora_down", "lora_up")):
        place_of = [2048 * number, 2048 * (number + 1)]
        head[f"{module}.{part}.weight"] = {"dtype": "F32", "shape": [16, 32], "data_offsets": place_of}
    head = json.dumps(head).encode()
    with open(f"{place}/last.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head + data)


if word == "second":
    # The first attempt fails, and leaves something.
    marker = "/app/checkpoints/seen"
    if not os.path.exists(marker):
        open(marker, "w").close()
        sys.exit(3)
submit()
if word == "look":
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    try:
        open("/cache/new", "w")
        wrote = True
    except OSError:
        wrote = False
    shm = os.statvfs("/dev/shm")
    found = {
        "capabilities": int(status["CapEff"], 16),
        "no_new_privileges": int(status["NoNewPrivs"]),
        "cache_writable": wrote,
        "interfaces": sorted(os.listdir("/sys/class/net")),
        "shared_memory": shm.f_blocks * shm.f_frsize,
        "arguments": sys.argv[1:],
        "environment": sorted(name for name in os.environ if name.startswith(("HF_", "HUGG", "TRANS"))),
        "cache": sorted(os.path.join(top, name) for top, _, names in os.walk("/cache") for name in names),
    }
    print("found " + json.dumps(found), flush=True)
elif word == "leak":
    print("learning_rate: 2e-4", "token", os.environ["HUGGINGFACE_TOKEN"], flush=True)
    print("lora_r: 32", flush=True)
elif word == "forever":
    time.sleep(10000)
elif word == "crash":
    sys.exit(3)
"""


def make_entry(directory: Path, files: dict[str, str] | None = None) -> Path:
    """A repository with one commit."""
    for name, text in (files or {f"dockerfiles/{IMAGE_DOCKERFILE}": DOCKERFILE, "train.py": TRAIN}).items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    commit_all(directory)
    return directory


def commit_all(directory: Path) -> None:
    author = ["-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "-A"], [*author, "commit", "-q", "-m", "an entry"]):
        subprocess.run(["git", "-C", str(directory), *command], check=True)
