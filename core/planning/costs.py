"""What a job spends beside training: fetching, preparing, loading, saving, publishing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from core.budget import Phase
from core.choices import CompileMode, Parallelism
from core.data import DatasetFacts
from core.hardware import Device, Hardware
from core.models import ModelFacts
from core.planning.sequences import Sequences
from core.planning.setup import Setup
from core.planning.speed import step_time
from core.planning.states import STATE_BYTES
from core.tasks import TaskType
from core.units import show_bytes

#: From launch to the engine's first own line: launcher, imports of torch and Axolotl, one process per GPU.
STARTUP_S, STARTUP_PER_GPU_S, STARTUP_CPU_S = 45.0, 3.0, 20.0
#: Rows and tokens that one core turns into training examples per second.
ROWS_PER_CORE, TOKENS_PER_CORE = 1500.0, 150e3
#: More workers than this gain nothing in `datasets`.
MOST_WORKERS = 16
#: Cold starts: Axolotl's documentation says 5 to 15 minutes.
COMPILE_S: dict[CompileMode, float] = {
    CompileMode.DEFAULT: 300.0,
    CompileMode.REDUCE_OVERHEAD: 420.0,
    CompileMode.MAX_AUTOTUNE: 900.0,
}
#: Writing checkpoints, and the pause around each.
WRITE_RATE, SAVE_PAUSE_S = 1.0e9, 2.0
#: Publishing: creating the repository, hashing, the commit; and what uploads lose to the nominal rate.
PUBLISH_S, UPLOAD_SLACK = 30.0, 1.3
#: Pictures: encoding one with the VAE and its caption, on any GPU.
ENCODE_S = 0.5


@dataclass(frozen=True, slots=True)
class Site:
    """Where the job runs, as far as time cares."""

    hardware: Hardware
    #: The base model lies on disk already: a tournament's cache, or an earlier job's.
    model_here: bool = False
    #: We upload the result ourselves; in tournaments the validator does.
    publishes: bool = True
    #: What steps of this shape took in earlier runs, relative to the prior.
    slowness: float = 1.0


class Stretch(NamedTuple):
    """A phase as the search knows it: the words are made once a plan is written."""

    name: str
    seconds: float
    why: Callable[[], str]

    def phase(self) -> Phase:
        return Phase(name=self.name, seconds=self.seconds, why=self.why())


def opening(s: Setup, seq: Sequences, model: ModelFacts, data: DatasetFacts, site: Site) -> list[Stretch]:
    """Everything before the first step, in order."""
    found = []
    if not site.model_here:
        size = model.stored_bytes
        rate = site.hardware.download_rate
        found.append(Stretch("download", 5.0 + size / rate, lambda: _at_rate(size, rate)))
    found.append(_starting(s))
    found.append(_preparing(seq, data, site))
    found.append(_loading(s, model, site))
    mode = s.compile_mode
    if mode is not None and s.kind.device is Device.CUDA:
        found.append(Stretch("compile", COMPILE_S[mode], lambda: mode.value))
    if s.task is TaskType.DPO and s.reference_ready:
        found.append(_reference(s, seq))
    return found


def _at_rate(size: float, rate: float) -> str:
    return f"{show_bytes(size)} at {show_bytes(rate)}/s"


def _starting(s: Setup) -> Stretch:
    cpu = s.kind.device is Device.CPU
    seconds = STARTUP_CPU_S if cpu else STARTUP_S + STARTUP_PER_GPU_S * s.world
    return Stretch("start", seconds, lambda: f"imports, {s.world} process{'es' if s.world > 1 else ''}")


def _preparing(seq: Sequences, data: DatasetFacts, site: Site) -> Stretch:
    if data.task_type is TaskType.IMAGE:
        return Stretch("prepare", 5 + ENCODE_S * data.rows, lambda: f"{data.rows} pictures to latents")
    workers = min(site.hardware.cpu_cores, MOST_WORKERS)
    tokens = data.rows * (data.total.mean + (data.rejected.mean if data.rejected else 0))
    seconds = 3 + data.rows / (ROWS_PER_CORE * workers) + tokens / (TOKENS_PER_CORE * workers)
    return Stretch("prepare", seconds, lambda: f"tokenising {data.rows:,} rows on {workers} cores")


def _loading(s: Setup, model: ModelFacts, site: Site) -> Stretch:
    """Ranks of one host read the same pages; sharding sends them on."""
    size, rate = model.stored_bytes, site.hardware.disk_rate
    seconds = 5 + size / rate * (1.5 if s.parallelism is Parallelism.FSDP else 1.0)
    return Stretch("load", seconds, lambda: _at_rate(size, rate))


def _reference(s: Setup, seq: Sequences) -> Stretch:
    """A third of a training step's work per pair, once."""
    one = step_time(s, seq.work(s.micro)).compute_s / s.accumulation
    seconds = seq.rows / (s.micro * s.world) * one / 3
    return Stretch("reference", seconds, lambda: "reference log-probs of every pair")


def result_bytes(s: Setup) -> int:
    """What is submitted: the adapter, or the whole model."""
    if s.full:
        return s.shape.params * 2
    return s.adapter_params * (s.trained_width if s.picture is None else 2)


def checkpoint_bytes(s: Setup) -> int:
    """With the optimizer's states, to resume from."""
    fp32, bf16 = STATE_BYTES[s.optimizer]
    states = fp32 if s.trained_width == 4 else bf16
    return result_bytes(s) + (0 if s.picture is not None else round(s.trained_params * states))


def checkpoint_room(s: Setup, model: ModelFacts, site: Site) -> float:
    """Disk that checkpoints may fill: what is free, less the model still to come and the submission."""
    free = site.hardware.disk_free_bytes
    if free is None:
        return math.inf
    return float(max(free - result_bytes(s) - (0 if site.model_here else model.stored_bytes), 0))


def save_seconds(s: Setup) -> float:
    """A checkpoint and the submission beside it."""
    return SAVE_PAUSE_S + (checkpoint_bytes(s) + result_bytes(s)) / WRITE_RATE


def publishing(s: Setup, site: Site) -> Stretch:
    size = result_bytes(s)
    if not site.publishes:
        return Stretch("finish", 10 + size / WRITE_RATE, lambda: "moving the result into place")
    rate = site.hardware.upload_rate
    return Stretch("publish", PUBLISH_S + size * UPLOAD_SLACK / rate, lambda: _at_rate(size, rate))
