"""Rehearse the image kinds of tournaments with the real engines and small models: clone to score, on a CPU.

    python rehearse.py OUT SD_SCRIPTS AI_TOOLKIT RECORDS [KIND …]

OUT has `models` and `bin`; RECORDS gets one line of JSON for each kind. A Docker Engine of its own shows this
machine's environments to its containers; what is built on them is this working tree by its own Dockerfiles.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core.domain.tournament_rules import IMAGE_DOCKERFILE
from miner.tournament.rehearsal.inputs import stand_in_pictures
from miner.tournament.rules import TASKS
from tests.doubles import base_image
from tests.doubles.dockerd import Dockerd, why_not
from tests.integration.test_images import UV, UV_BASE, build_base
from tests.miner.tournament.rehearsed_entries import commit_all

ROOT = Path(__file__).resolve().parents[2]
SMALLER = ROOT / "scripts" / "real_image_engines" / "smaller"
#: What the images are built from.
INGREDIENTS = ("configs", "core", "dockerfiles", "trainer")
BASE, UV_TAG = "real-engines:1", "uv:1"
HOURS = "0.5"
#: Both engines in one base, at the places where the published bases have them.
DOCKERFILE = f"""
FROM {base_image.NAME}
COPY engine /opt/engine
RUN chmod -R 755 /opt/engine/bin
RUN ["python", "-c", "import json, os; os.makedirs('/app', exist_ok=True); \\
    [os.symlink(path, place) for place, path in json.load(open('/opt/engine/places.json')).items()]"]
ENV PATH=/opt/engine/bin:/usr/local/bin:/usr/bin:/bin
"""


def kinds() -> list[str]:
    return [task.name for task in TASKS.values() if task.image_type is not None]


def engine_of(kind: str) -> str:
    return "kohya" if TASKS[kind].dockerfile == IMAGE_DOCKERFILE else "ai-toolkit"


def model_of(out: Path, kind: str) -> Path:
    """A validator's cache for this kind, as `train.py` has it."""
    return out / "models" / (f"kohya-{kind}" if engine_of(kind) == "kohya" else kind)


def engine_python(out: Path, engine: str) -> str:
    """Environment of the engine in `bin`, in which scorers find our modules too."""
    given = (out / "bin" / f"python-{engine}").read_text("utf-8").split()[-2]
    return f'#!/bin/sh\nPYTHONPATH={SMALLER}${{PYTHONPATH:+:$PYTHONPATH}} exec {given} "$@"\n'


def mounted(out: Path, checkouts: dict[str, Path]) -> list[Path]:
    code = "import sys; print(sys.prefix); print(sys.base_prefix)"
    # ai-toolkit loads libraries of the system by name.
    places = [Path("/usr/lib"), SMALLER, out / "models", *checkouts.values()]
    for python in (sys.executable, *(str(out / "bin" / f"python-{engine}") for engine in checkouts)):
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
        places += [Path(line) for line in done.stdout.split() if line != "/usr"]
    return list(dict.fromkeys(places))


def make_bases(docker: Dockerd, out: Path, checkouts: dict[str, Path]) -> None:
    base_image.load(docker.host)
    build_base(docker, UV_TAG, UV_BASE, {"uv": UV})
    for engine, checkout in checkouts.items():
        python = engine_python(out, engine)
        name = "/app/sd-scripts" if engine == "kohya" else "/app/ai-toolkit"
        places = {name: str(checkout), "/app/flux": str(out / "models" / "kohya-flux" / "flux_parts")}
        files = {"engine/bin/python": python, "engine/bin/python3": python}
        build_base(
            docker, f"{engine}-{BASE}", DOCKERFILE, {**files, "engine/places.json": json.dumps(places)}
        )


def make_entry(folder: Path) -> Path:
    """This working tree as a repository, whatever of it is committed."""
    for name in INGREDIENTS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    commit_all(folder)
    return folder


def rehearse(docker: Dockerd, out: Path, entry: Path, engine: str, chosen: list[str]) -> dict[str, Any]:
    """The command's own report for the kinds of one engine."""
    output = out / "rehearsals" / engine
    shutil.rmtree(output, ignore_errors=True)
    hub = entry.parent / f"hub-{engine}"
    for kind in chosen:
        shutil.copytree(model_of(out, kind) / "hf_cache", hub, symlinks=True, dirs_exist_ok=True)
    pictures = entry.parent / "pictures.zip"
    pictures.write_bytes(stand_in_pictures(width=512, height=128))  # they are scored 1,024 pixels wide
    command = [sys.executable, "-m", "miner", "tournament", "rehearse", str(entry), "--json", "--gpu", "none"]
    command += ["--output", str(output), "--build-network", "none", "--hours", HOURS]
    command += ["--hub-cache", str(hub), "--trigger-word", "lora", "--data", str(pictures)]
    command += ["--build-arg", f"BASE_IMAGE={engine}-{BASE}", "--build-arg", f"UV_IMAGE={UV_TAG}"]
    command += ["--build-arg", "COMFYUI_COMMIT=", "--build-arg", "EVALUATOR_FILES=no"]
    for kind in chosen:
        (model,) = (model_of(out, kind) / "models").iterdir()
        command += ["--task", kind, "--model", f"{kind}={model}"]
    environment = {**os.environ, "DOCKER_HOST": docker.host, "DATA_DIR": str(entry.parent / "data")}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, cwd=ROOT, check=False)
    found: dict[str, Any] = json.loads(done.stdout or "{}")
    return found


def records(engine: str, report: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for task in report.get("tasks", ()):
        score = task["score"]
        problems = [*task["problems"], *([] if score else ["it has no score"])]
        said = "; ".join(problems) or f"{score['base']:.4f} -> {score['ours']:.4f}"
        record = {"name": "rehearsed", "engine": engine, "family": task["task"], "ok": not problems}
        yield {**record, "said": said, "seconds": task["seconds"], "peak_bytes": 0}


def main(out: str, kohya: str, toolkit: str, path: str, *chosen: str) -> int:
    if why := why_not():
        print(f"nothing is rehearsed: {why}", file=sys.stderr)
        return 1
    checkouts = {"kohya": Path(kohya), "ai-toolkit": Path(toolkit)}
    failed = False
    place = Path(tempfile.mkdtemp(prefix="gm-"))  # a socket's path must be short
    try:
        entry = make_entry(place / "entry")
        with Dockerd(place / "d", mounted=mounted(Path(out), checkouts)) as docker:
            make_bases(docker, Path(out), checkouts)
            for engine in checkouts:
                those = [kind for kind in chosen or kinds() if engine_of(kind) == engine]
                report = rehearse(docker, Path(out), entry, engine, those) if those else {"tasks": []}
                found = list(records(engine, report))
                with Path(path).open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(record) + "\n" for record in found)
                failed = failed or len(found) < len(those) or not all(record["ok"] for record in found)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
