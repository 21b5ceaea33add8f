"""`python -m benchmarks gpu`: part after part, the most valuable first, each in a process of its own.

After every part, and within it every few seconds, `gpu.json` and `gpu.txt` are written again: whatever ends
this, what was measured is there. A part that crashes, hangs or runs out of memory costs itself alone. Here is
no torch: what is installed beside pydantic, PyYAML, rich and typer matters to the parts only.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any, NamedTuple

import typer

from benchmarks.gpu import wheels as carried
from benchmarks.gpu.figures import Figure, GpuReport, PartResult, PartState
from core.domain.hardware import CPU, GpuKind
from core.planning.measured import MeasuredTraining
from core.system import wrapper


class Part(NamedTuple):
    name: str
    #: As planned; it may take half as long again while there is time.
    seconds: int
    settles: str


PARTS = (
    Part("ceilings", 20, "what the card's products and copies reach: the meaning of 'of peak'"),
    Part("lora", 110, "LoRA r64 of Llama-3.1-8B's shape, packed to 4,096: speed, MFU, peak, compile time"),
    Part("full", 80, "a full fine-tune of Qwen2.5-1.5B's shape: the same, the optimizer, the loss, a save"),
    Part("trainers", 60, "both with Hugging Face's Trainer: whether the native trainer earns its place"),
    Part("attention", 30, "packed rows: a dense mask, rows alone, varlen; whether they are equal"),
    Part("grpo", 40, "sampling of a GRPO step: ours beside transformers', 32 and 512 completions"),
    Part("seeded", 45, "the same training on the CPU and here: losses within 2 %"),
    Part("memory", 50, "out of memory on purpose: remedy, next launch, SIGTERM"),
    Part("dpo", 40, "DPO of Llama-3.2-3B's shape by adapter"),
    Part("fp8", 20, "fp8 products beside bf16 ones"),
    Part("pictures", 40, "a picture's step through Flux's transformer with an adapter"),
    Part("axolotl", 60, "both with Axolotl, if it is installed"),
)
#: With `--model` alone.
OWN = Part("own", 80, "LoRA of the model that was named")
#: Without so much a part is not begun: imports alone take this long.
_LEAST_S = 12
#: For the last table.
_MARGIN_S = 4
#: A part that ran past its time is asked, then ended.
_GRACE_S = 4
#: The first scan takes seconds where the driver keeps no state between its users.
_SCAN_S = 30
#: The models of all parts, written and read once: memory that looks like a disk where there is enough of it.
_SHM, _NEEDED = Path("/dev/shm"), 60 * 2**30


class NvmlWatch:
    """The daemon's own reader of the GPUs, asked once a second beside the parts."""

    def __init__(self) -> None:
        self.samples: list[dict[str, Any]] = []
        self.problem = ""
        self._child = subprocess.Popen(
            [sys.executable, "-m", "miner.fleet.nvml_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._over, self._scanned = threading.Event(), threading.Event()
        self._driver = ""
        threading.Thread(target=self._follow, daemon=True).start()

    def driver(self) -> str:
        """The driver's version, or nothing where no GPU answers: a broken driver may never do."""
        if not self._scanned.wait(_SCAN_S):
            self.problem = f"NVML did not answer in {_SCAN_S} s"
        return self._driver

    def _ask(self, what: str) -> dict[str, Any]:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        try:
            self._child.stdin.write(what + "\n")
            self._child.stdin.flush()
            found: dict[str, Any] = json.loads(self._child.stdout.readline() or "{}")
        except (OSError, ValueError):
            return {}
        return found

    def _follow(self) -> None:
        answer = self._ask("scan")
        self._driver = str(answer.get("driver", ""))
        if not answer.get("gpus"):
            self.problem = str(answer.get("problem") or "NVML's reader did not answer")
            self._over.set()
        self._scanned.set()
        while not self._over.wait(1.0):
            for row in self._ask("sample").get("samples", ())[:1]:
                self.samples.append(row["sample"])

    def figures(self, kind: GpuKind) -> Iterator[Figure]:
        """Sum up the reader's samples while the part was at work: of the upper half by power."""
        busy = sorted(self.samples, key=lambda sample: sample.get("power_watts") or 0)[
            len(self.samples) // 2 :
        ]
        bounds = {
            "utilization": (0.5, 1.0),
            "tensor": (0.05, 1.0),
            "dram": (0.05, 1.0),
            "power_watts": (150.0, 1000.0),
            "temperature": (20.0, 95.0),
            "sm_clock_mhz": (900.0, 2100.0),
            "memory_used": (1e9, float(kind.memory_bytes)),
        }
        for name, (low, high) in bounds.items():
            values = [float(sample[name]) for sample in busy if sample.get(name) is not None]
            if values:
                yield Figure(name=f"NVML: {name}", value=median(values), low=low, high=high, bounds_for="H")

    def close(self) -> None:
        self._over.set()
        self._child.kill()
        self._child.wait()


@dataclass
class GpuRun:
    """One run of the parts. `start` begins a part's process; tests put their own in its place."""

    out: Path
    root: Path
    report: GpuReport
    #: By the monotonic clock.
    end: float
    start: Callable[[str, Path, Path, float], subprocess.Popen[bytes]]
    kind: GpuKind = CPU
    watch: NvmlWatch | None = None
    say: Callable[[str], None] = print
    results: list[PartResult] = field(default_factory=list)
    stopped: bool = False

    def run(self, parts: Sequence[Part]) -> None:
        for place, part in enumerate(parts):
            self._write(None, parts[place:])
            left = self.end - time.monotonic() - _MARGIN_S
            if self.stopped or left < _LEAST_S:
                why = "stopped from outside" if self.stopped else f"{max(left, 0):.0f} s were left"
                self.results.append(PartResult(name=part.name, state=PartState.SKIPPED, reason=why))
            else:
                self._part(part, min(left, self._patience * part.seconds), parts[place + 1 :])
        self._write(None, ())

    @property
    def _patience(self) -> float:
        """A CPU is slow, and what it tries is small."""
        return 4.0 if self.report.small else 1.5

    def _part(self, part: Part, limit: float, later: Sequence[Part]) -> None:
        self.say(f"{part.name} ({limit:.0f} s at most): {part.settles}")
        answers = self.root / f"{part.name}.jsonl"
        began = time.monotonic()
        if self.watch is not None:
            self.watch.samples.clear()
        beside = set(wrapper.descendant_pids())
        child = self.start(part.name, self.root, answers, limit)
        cut = False
        try:
            while child.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(timeout=1)
                if child.returncode is None and (self.stopped or time.monotonic() - began > limit):
                    cut = True
                    self._end(child)
                self._write(_result(part, PartState.RUNNING, time.monotonic() - began, "", answers), later)
        finally:  # no matter how it ended: what it left would hold the card while the next one is measured
            wrapper.kill_until_gone(lambda: set(wrapper.descendant_pids()) - beside, _GRACE_S)
            child.poll()
        cut |= self.stopped and child.returncode != 0  # Ctrl-C reaches the part itself as well
        seconds = time.monotonic() - began
        state, reason = PartState.DONE, ""
        if cut:
            state = PartState.CUT
            reason = "stopped from outside" if self.stopped else f"ended after {seconds:.0f} s"
        elif child.returncode:
            state, reason = PartState.FAILED, _why(child.returncode, self.out / "log")
        result = _result(part, state, seconds, reason, answers)
        if self.watch is not None and part.name == "lora":
            why = (f"NVML: {self.watch.problem}",) if self.watch.problem else ()
            figures = (*result.figures, *self.watch.figures(self.kind))
            result = result.model_copy(update={"figures": figures, "notes": (*result.notes, *why)})
        self.results.append(result)
        self.say(f"  {state.value} after {seconds:.0f} s{f': {reason.splitlines()[-1]}' if reason else ''}")

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        """End the part's process, and whatever it has started: a trainer is in a session of its own."""
        below = [*wrapper.descendant_pids(child.pid), child.pid]
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in below:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=_GRACE_S)
            below = sorted({*below, *wrapper.descendant_pids(child.pid)} & set(_running()))

    def _write(self, now: PartResult | None, later: Sequence[Part]) -> None:
        waiting = [PartResult(name=part.name, state=PartState.WAITING) for part in later]
        parts = (*self.results, *([now] if now is not None else []), *waiting)
        self.report = self.report.model_copy(update={"parts": parts})
        self.report.write(self.out)
        (self.root / "so-far.json").write_text(self.report.model_dump_json(), encoding="utf-8")


def _running() -> Iterator[int]:
    return (process.pid for process in wrapper.processes())


def _why(code: int, log: Path) -> str:
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    return f"exit code {code}: {lines[-1][:300] if lines else 'it said nothing'}"


def _result(part: Part, state: PartState, seconds: float, reason: str, answers: Path) -> PartResult:
    """With what the part has written; a half-written last line is left out."""
    figures, trainings, notes = list[Figure](), list[MeasuredTraining](), list[str]()
    for line in answers.read_text("utf-8").splitlines() if answers.exists() else ():
        with contextlib.suppress(ValueError):
            for kind, content in json.loads(line).items():
                if kind == "figure":
                    figures.append(Figure.model_validate(content))
                elif kind == "training":
                    trainings.append(MeasuredTraining.model_validate(content))
                else:
                    notes.append(content)
    return PartResult(
        name=part.name,
        state=state,
        seconds=round(seconds, 1),
        reason=reason,
        figures=tuple(figures),
        trainings=tuple(trainings),
        notes=tuple(notes),
    )


def starter(log: Path, small: bool) -> Callable[..., subprocess.Popen[bytes]]:
    offline = dict.fromkeys(
        ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "DO_NOT_TRACK"), "1"
    )
    more = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", "TQDM_DISABLE": "1"}
    env = {"OMP_NUM_THREADS": "1" if small else "4"} | os.environ | offline | more
    # As a training is launched.
    env |= {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}

    def start(name: str, root: Path, answers: Path, seconds: float) -> subprocess.Popen[bytes]:
        arguments = [
            name,
            str(root),
            str(answers),
            f"{time.monotonic() + seconds - 1:.1f}",
            *(["small"] if small else []),
        ]
        command = [sys.executable, "-m", "benchmarks.gpu.parts", *arguments]
        own = {
            **env,
            "TORCHINDUCTOR_CACHE_DIR": str(root / "inductor"),
            "TRITON_CACHE_DIR": str(root / "triton"),
        }
        if name in carried.OF_PART:
            own["PYTHONPATH"] += os.pathsep + str(carried.OF_PART[name])
        with log.open("ab") as output:
            output.write(f"\n=== {name}\n".encode())
            output.flush()
            return subprocess.Popen(
                command, env=own, cwd=carried.ROOT, stdout=output, stderr=subprocess.STDOUT
            )

    return start


def visible_card(seconds: float) -> GpuKind:
    """The first GPU as the trainer sees it, by a child: torch stays out of here."""
    code = "from trainer.runner.planning import visible_gpus; print(visible_gpus().kind.model_dump_json())"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=False,
            cwd=carried.ROOT,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        text = f"torch did not see the GPU within {seconds:.0f} s: `nvidia-smi` says if the driver answers"
        raise typer.BadParameter(text, param_hint="python") from None
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1:]
        raise typer.BadParameter(f"{sys.executable} cannot train: {' '.join(why)}", param_hint="python")
    return GpuKind.model_validate_json(done.stdout.strip().splitlines()[-1])


def versions(driver: str) -> dict[str, str]:
    from miner import __version__

    made = {"god-miner": __version__, "Python": sys.version.split()[0]}
    for name in ("torch", "triton", "transformers", "peft", "liger-kernel", "axolotl", "torchao"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            made[name] = importlib.metadata.version(name)
    return made | ({"driver": driver} if driver else {})


def _chosen(names: list[str] | None) -> list[Part]:
    unknown = sorted(set(names or ()) - {part.name for part in PARTS})
    if unknown:
        there = ", ".join(part.name for part in PARTS)
        raise typer.BadParameter(f"no part is called {', '.join(unknown)}; there are {there}")
    return [part for part in PARTS if not names or part.name in names]


def gpu(
    part: Annotated[list[str] | None, typer.Option(help="Part to run (repeatable). Default: all.")] = None,
    seconds: Annotated[float, typer.Option(min=20, help="Seconds after which everything is over.")] = 540,
    out: Annotated[Path, typer.Option(help="Folder for gpu.json, gpu.txt and the log.")] = Path("gpu-check"),
    wheels: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Folder of wheels to use beside what is installed."),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Directory of a model to train a few steps of, too."),
    ] = None,
    small: Annotated[
        bool | None, typer.Option("--small/--real", help="Little shapes. Default: where there is no GPU.")
    ] = None,
) -> None:
    """Measure this machine's first GPU in parts, and print them beside what plans expect of it."""
    end, parts = time.monotonic() + seconds, _chosen(part)
    if model is not None:
        os.environ["GPU_CHECK_MODEL"] = str(model.resolve())
        parts.insert(min(2, len(parts)), OWN)
    del wheels  # on the path already (`use_wheels`)
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    kind = visible_card(seconds)
    is_small = kind == CPU if small is None else small
    shm = _SHM if _SHM.is_dir() and shutil.disk_usage(_SHM).free > _NEEDED else None
    watch = NvmlWatch()
    wrapper.adopt_orphans()
    try:
        today = datetime.datetime.now(datetime.UTC).date()
        report = GpuReport(gpu=kind.name, date=today, small=is_small, versions=versions(watch.driver()))
        with tempfile.TemporaryDirectory(prefix="god-miner-gpu-", dir=shm) as root:
            run = GpuRun(out, Path(root), report, end, starter(out / "log", is_small), kind, watch)
            with _stopping(run):
                run.run(parts)
    finally:
        watch.close()
    print(run.report.text(shutil.get_terminal_size((118, 40)).columns))
    print(f"written to {out}")
    states = {result.state for result in run.results}
    raise typer.Exit(1 if run.stopped or PartState.FAILED in states else 0)


@contextlib.contextmanager
def _stopping(run: GpuRun) -> Iterator[None]:
    """SIGTERM and SIGINT end the part that runs; the table is written as ever."""

    def stop(_number: int, _frame: object) -> None:
        run.stopped = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
