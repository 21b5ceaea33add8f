"""Train each family's small model through the trainer's own entry point, as a validator starts it.

    python train.py OUT SD_SCRIPTS AI_TOOLKIT (container|process) RECORDS

OUT has `models` and `bin`; RECORDS gets one line of JSON for each training. In a container the validator's
options apply: no capabilities, no new privileges, no network, /cache read-only. Without one they do not.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from each import key_prefix

from core.runs.progress import StepEvent, SubmissionEvent, parse_events
from core.runs.run_files import PROGRESS_FILE
from core.submission.safetensors import read_header
from tests.trainer.runner.pictures import png
from trainer.runner.image_monitor import LAST_FILE

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "scripts" / "real_image_engines"
IMAGE = "god-miner-real-image-engines:1"
TASK, REPO, HOURS = "0d63e5c4", "tournament-t-0d63e5c4-5Gabc", "0.75"
PICTURES = 12
LIMIT_S = 1500


class EngineTraining(NamedTuple):
    engine: str
    family: str

    @property
    def models(self) -> str:
        """The directory of its small model."""
        return f"kohya-{self.family}" if self.engine == "kohya" else self.family


TRAININGS = (
    EngineTraining("kohya", "sdxl"),
    EngineTraining("kohya", "flux"),
    *(EngineTraining("ai-toolkit", name) for name in ("z-image", "qwen-image", "krea2", "ideogram4", "flux")),
)


def write_pictures(cache: Path) -> None:
    """The validator's zip: one top folder, a caption beside each picture."""
    import zipfile

    path = cache / "datasets" / f"{TASK}_tourn.zip"
    path.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for at in range(PICTURES):
            archive.writestr(f"train_data/{at}.png", png(side=64 + 32 * (at % 3), shade=20 * at))
            archive.writestr(f"train_data/{at}.txt", f"a grey square of shade {at}")


def environment(training: EngineTraining, out: Path, engines: dict[str, Path], cache: str) -> dict[str, str]:
    """The image's own variables, and those that validators set."""
    absent = str(out / "no-such-engine")
    kohya = training.engine == "kohya"
    return {
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "GOD_MINER_KOHYA": str(engines["kohya"]) if kohya else absent,
        "GOD_MINER_AI_TOOLKIT": absent if kohya else str(engines["ai-toolkit"]),
        "GOD_MINER_FLUX": str(out / "models" / "kohya-flux" / "flux_parts"),
        "GOD_MINER_ENGINE_PYTHON": str(out / "bin" / f"python-{training.engine}"),
        "TRANSFORMERS_CACHE": f"{cache}/hf_cache",
        "HF_HOME": f"{cache}/hf_cache",
    }


def arguments(training: EngineTraining) -> list[str]:
    return [
        *("--task-id", TASK, "--model", f"tiny/{training.family}", "--model-type", training.family),
        *("--dataset-zip", "https://example.com/pictures.zip", "--expected-repo-name", REPO),
        *("--hours-to-complete", HOURS, "--trigger-word", "lora"),
    ]


def as_process(training: EngineTraining, out: Path, engines: dict[str, Path], folder: Path) -> list[str]:
    cache = out / "models" / training.models
    variables = environment(training, out, engines, str(cache)) | {"GOD_MINER_WORK": str(folder / "work")}
    set_here = [f"{name}={value}" for name, value in variables.items()]
    places = [str(cache), str(folder / "checkpoints")]
    start = [sys.executable, str(HERE / "start.py"), *places, "--"]
    return ["env", *set_here, *start, *arguments(training)]


def as_container(training: EngineTraining, out: Path, engines: dict[str, Path], folder: Path) -> list[str]:
    """On a base of nothing: this machine's system and interpreters are mounted, read-only."""
    cache = out / "models" / training.models
    variables = environment(training, out, engines, "/cache") | {"GOD_MINER_WORK": "/app/checkpoints/work"}
    mounts = [f"{path}:{path}:ro" for path in _system(out, engines)]
    mounts += [f"{cache}:/cache:ro", f"{folder / 'checkpoints'}:/app/checkpoints"]
    options = ["--rm", "--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--network", "none"]
    options += ["--shm-size", "8g", "--memory", "110g", "--entrypoint", sys.executable]
    for name, value in variables.items():
        options += ["--env", f"{name}={value}"]
    for mount in mounts:
        options += ["--volume", mount]
    return ["docker", "run", *options, IMAGE, str(HERE / "start.py"), "--", *arguments(training)]


def _system(out: Path, engines: dict[str, Path]) -> list[Path]:
    places = [Path("/usr"), Path("/bin"), Path("/sbin"), Path("/lib"), Path("/lib64"), Path("/etc/ssl")]
    code = "import sys; print(sys.prefix); print(sys.base_prefix)"
    for python in (sys.executable, *(str(out / "bin" / f"python-{engine}") for engine in engines)):
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
        places += [Path(line) for line in done.stdout.split()]
    places += [ROOT, out / "bin", out / "models", *engines.values()]
    kept = [path for path in dict.fromkeys(places) if path.exists()]
    return [path for path in kept if not any(other in path.parents for other in kept)]


def make_image() -> None:
    """Nothing but the directories that programs expect to be able to write to, and root's name."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name in ("tmp", "root", "app", "cache", "dev", "proc", "sys", "etc"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            archive.addfile(entry)
        names = b"root:x:0:0:root:/root:/bin/sh\n"
        passwd = tarfile.TarInfo("etc/passwd")
        passwd.size = len(names)
        archive.addfile(passwd, io.BytesIO(names))
    command = ["docker", "import", "--change", "ENV PATH=/usr/local/bin:/usr/bin:/bin", "-", IMAGE]
    subprocess.run(command, input=data.getvalue(), check=True, stdout=subprocess.DEVNULL)


def outcome(folder: Path, ended: int, log: str) -> Iterator[str]:
    """Problem of the files that a training left."""
    submission = folder / "checkpoints" / TASK / REPO
    adapter = submission / LAST_FILE
    if ended != 0:
        yield f"exit {ended}: {last_words(log)}"
    if not adapter.is_file():
        yield f"no {LAST_FILE}"
        return
    weights = sorted(path.name for path in submission.rglob("*.safetensors"))
    if weights != [LAST_FILE]:
        yield f"weights beside it: {', '.join(weights)}"
    (progress,) = folder.rglob(f"work/*/{PROGRESS_FILE}")
    events = [event for line in progress.read_bytes().splitlines(True) for event, _ in parse_events(line)]
    steps = [event for event in events if isinstance(event, StepEvent)]
    if not any(step.loss is not None for step in steps):
        yield "no step with a loss was read from the engine's output"
    if not any(isinstance(event, SubmissionEvent) for event in events):
        yield "no submission was noted"


def last_words(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if "Error" in line or "Exception" in line]
    return lines[-1][:200] if lines else "no error in the log"


def prefixes(adapter: Path) -> list[str]:
    with adapter.open("rb") as file:
        return sorted({key_prefix(name) for name in read_header(file).tensors})


def train(training: EngineTraining, out: Path, engines: dict[str, Path], container: bool) -> dict[str, Any]:
    folder = out / "runs" / training.models
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "checkpoints").mkdir(parents=True)
    write_pictures(out / "models" / training.models)
    command = (as_container if container else as_process)(training, out, engines, folder)
    with (folder / "log").open("wb") as log:
        ended = subprocess.run(command, stdout=log, stderr=log, timeout=LIMIT_S, check=False).returncode
    text = (folder / "log").read_text("utf-8", "replace")
    measured = json.loads(
        next((line for line in reversed(text.splitlines()) if '"peak_bytes"' in line), "{}")
    )
    problems = list(outcome(folder, ended, text))
    adapter = folder / "checkpoints" / TASK / REPO / LAST_FILE
    if adapter.is_file():
        (out / "adapters" / training.models).mkdir(parents=True, exist_ok=True)
        shutil.copy(adapter, out / "adapters" / training.models)
    said = "; ".join(problems) or ", ".join(prefixes(adapter))
    record = {"name": "trained", "engine": training.engine, "family": training.family, "ok": not problems}
    return {**record, "said": said, "seconds": 0.0, "peak_bytes": 0, **_figures(measured)}


def _figures(measured: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, 1) for key, value in measured.items() if key in ("seconds", "peak_bytes")}


def main(out: str, kohya: str, toolkit: str, how: str, records: str) -> int:
    engines = {"kohya": Path(kohya), "ai-toolkit": Path(toolkit)}
    if how == "container":
        make_image()
    failed = False
    with Path(records).open("a", encoding="utf-8") as file:
        for training in TRAININGS:
            print(f"training {training.family} with {training.engine}", file=sys.stderr, flush=True)
            record = train(training, Path(out), engines, how == "container")
            failed = failed or not record["ok"]
            file.write(json.dumps(record) + "\n")
            file.flush()
    return int(failed)


if __name__ == "__main__":
    os.umask(0o022)
    raise SystemExit(main(*sys.argv[1:]))
