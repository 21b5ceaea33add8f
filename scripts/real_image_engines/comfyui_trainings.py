"""Train each family's small model in ComfyUI's real code, and compare our measure with a separate evaluation.

COMFYUI_PYTHON comfyui_trainings.py OUT COMFYUI RECORDS [FAMILY ...]

OUT gets a folder for each family: its model, pictures, the training with its log, both evaluations. RECORDS
gets one line of JSON for each: it is in order if the training ends well, the evaluator's loader leaves no key
of the file over, the score on unseen pictures falls, and both evaluations of base and adapter are equal.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FAMILIES = ("z-image", "flux", "qwen-image", "krea2", "ideogram4")
#: What the evaluator loads once more, since its numbers are not those of a training.
TWINS = ("qwen-image", "ideogram4")
PICTURES, UNSEEN = 12, 2
STEPS, NOISES, LIMIT_S = 100, 2, 1500
#: Relative, of every loss.
EQUAL = 1e-6
#: Long and low, so that a picture of 1,024 pixels is a hundred tokens or two.
SIZE = 256, 8


def write_pictures(folder: Path, seed: int, count: int) -> None:
    folder.mkdir(parents=True)
    drawn = np.random.default_rng(seed)
    for at in range(count):
        blotches = drawn.integers(0, 256, (2, 16, 3), dtype=np.uint8)
        blotches[..., 2] = 200
        Image.fromarray(blotches).resize(SIZE, Image.Resampling.BICUBIC).save(folder / f"{at}.png")
        (folder / f"{at}.txt").write_text(f"blotches number {at}\n", encoding="utf-8")


def run(arguments: list[str], log: Path) -> int:
    """A program in this Python, offline, with small dimensions."""
    places = os.pathsep.join((str(HERE / "smaller"), str(ROOT)))
    offline = dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "OMP_NUM_THREADS"), "1")
    environment = {**os.environ, **offline, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": places}
    command = [sys.executable, *arguments]
    with log.open("ab") as output:
        return subprocess.run(
            command, env=environment, stdout=output, stderr=output, timeout=LIMIT_S, cwd=ROOT, check=False
        ).returncode


def train(folder: Path, model: dict[str, Any]) -> int:
    twin = model["base_path"] if model["family"] in TWINS else None
    sys.path.insert(0, str(ROOT))
    from core.models.image_families import IMAGE_FAMILIES

    rules = IMAGE_FAMILIES[model["family"]].flow
    assert rules is not None
    recipe = rules.recipe.model_copy(update={"max_steps": STEPS, "confirm_noises": 1})
    record = {
        "model": model,
        "twin_path": twin,
        "recipe": recipe.model_dump(mode="json"),
        "pictures_dir": str(folder / "pictures"),
        "model_id": f"tiny/{model['family']}",
        "submission_dir": str(folder / "submission"),
        "work_dir": str(folder / "work"),
        "progress_path": str(folder / "progress.jsonl"),
        "outcome_path": str(folder / "outcome.json"),
        "stop_path": str(folder / "stop"),
        "end_by": time.time() + LIMIT_S,
    }
    (folder / "work").mkdir()
    (folder / "run.json").write_text(json.dumps(record, indent=2), encoding="utf-8")
    return run(["-m", "trainer.pictures.train", str(folder / "run.json")], folder / "log")


def our_scores(folder: Path, model: dict[str, Any], adapter: str) -> list[dict[str, Any]]:
    job = {"model": model, "adapters": ["", adapter], "pictures_dir": str(folder / "unseen")}
    job |= {"report_path": str(folder / "ours.json"), "noises": NOISES}
    (folder / "job.json").write_text(json.dumps(job), encoding="utf-8")
    run(["-m", "trainer.pictures.evaluate", str(folder / "job.json")], folder / "log")
    rows: list[dict[str, Any]] = json.loads((folder / "ours.json").read_bytes())["adapters"]
    return rows


def separate_scores(folder: Path, adapter: str) -> list[dict[str, Any]]:
    places = [str(folder / name) for name in ("model/model.json", "unseen", "separate.json")]
    arguments = [str(HERE / "comfyui_evaluation.py"), *places, "--noises", str(NOISES), "base", adapter]
    run(arguments, folder / "log")
    rows: list[dict[str, Any]] = json.loads((folder / "separate.json").read_bytes())
    return rows


def difference(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> float:
    """The largest between the losses of single pictures."""
    pairs = [
        (mine, other)
        for row, row_of_them in zip(ours, theirs, strict=True)
        for name in ("text", "no_text")
        for mine, other in zip(row[f"{name}_losses"], row_of_them[name], strict=True)
    ]
    return max(abs(mine - other) / other for mine, other in pairs)


def attempt(family: str, out: Path, checkout: str) -> dict[str, Any]:
    folder = out / family
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_pictures(folder / "pictures", 1, PICTURES)
    write_pictures(folder / "unseen", 2, UNSEEN)
    run([str(HERE / "comfyui_models.py"), family, str(folder / "model"), checkout], folder / "log")
    model = json.loads((folder / "model" / "model.json").read_bytes())
    ended = train(folder, model)
    adapter = folder / "submission" / "last.safetensors"
    if ended or not adapter.is_file():
        return {"ok": False, "said": f"the training ended with {ended}; see {folder / 'log'}"}
    separate = separate_scores(folder, str(adapter))
    if errors := [row["error"] for row in separate if "error" in row]:
        return {"ok": False, "said": f"the evaluator refuses it: {errors[0]}"}
    base, trained = (row["score"] for row in separate)
    apart = difference(our_scores(folder, model, str(adapter)), separate)
    said = f"unseen {base:.4f} → {trained:.4f}, our measure differs by {apart:.1e}"
    return {"ok": trained < base and apart <= EQUAL, "said": said}


def main(out: str, checkout: str, records: str, *families: str) -> int:
    failed = 0
    for family in families or FAMILIES:
        print(f"training {family} in ComfyUI", file=sys.stderr, flush=True)
        began = time.monotonic()
        try:
            result = attempt(family, Path(out).resolve(), checkout)
        except (OSError, KeyError, subprocess.TimeoutExpired) as error:
            result = {"ok": False, "said": f"{type(error).__name__}: {error}"}
        failed += not result["ok"]
        seconds = round(time.monotonic() - began, 1)
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        record = {"name": "trained", "engine": "comfyui", "family": family, "seconds": seconds}
        with Path(records).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record | {"peak_bytes": peak} | result) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
