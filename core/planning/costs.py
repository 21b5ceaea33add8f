"""What a job spends beside training: fetching, preparing, loading, saving, publishing."""

from __future__ import annotations

import math
from dataclasses import dataclass

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


def opening(s: Setup, seq: Sequences, model: ModelFacts, data: DatasetFacts, site: Site) -> list[Phase]:
    """Everything before the first step, in order."""
    found = []
    if not site.model_here:
        size = model.stored_bytes
        seconds = 5.0 + size / site.hardware.download_rate
        why = f"{show_bytes(size)} at {show_bytes(site.hardware.download_rate)}/s"
        found.append(Phase(name="download", seconds=seconds, why=why))
    found.append(_starting(s))
    found.append(_preparing(seq, data, site))
    found.append(_loading(s, model, site))
    if s.compile_mode is not None and s.kind.device is Device.CUDA:
        found.append(Phase(name="compile", seconds=COMPILE_S[s.compile_mode], why=s.compile_mode.value))
    if s.task is TaskType.DPO and s.reference_ready:
        found.append(_reference(s, seq))
    return found


def _starting(s: Setup) -> Phase:
    cpu = s.kind.device is Device.CPU
    seconds = STARTUP_CPU_S if cpu else STARTUP_S + STARTUP_PER_GPU_S * s.world
    return Phase(
        name="start", seconds=seconds, why=f"imports, {s.world} process{'es' if s.world > 1 else ''}"
    )


def _preparing(seq: Sequences, data: DatasetFacts, site: Site) -> Phase:
    if data.task_type is TaskType.IMAGE:
        return Phase(name="prepare", seconds=5 + ENCODE_S * data.rows, why=f"{data.rows} pictures to latents")
    workers = min(site.hardware.cpu_cores, MOST_WORKERS)
    tokens = data.rows * (data.total.mean + (data.rejected.mean if data.rejected else 0))
    seconds = 3 + data.rows / (ROWS_PER_CORE * workers) + tokens / (TOKENS_PER_CORE * workers)
    return Phase(name="prepare", seconds=seconds, why=f"tokenising {data.rows:,} rows on {workers} cores")


def _loading(s: Setup, model: ModelFacts, site: Site) -> Phase:
    """Ranks of one host read the same pages; sharding sends them on."""
    size = model.stored_bytes
    seconds = 5 + size / site.hardware.disk_rate * (1.5 if s.parallelism is Parallelism.FSDP else 1.0)
    return Phase(
        name="load", seconds=seconds, why=f"{show_bytes(size)} at {show_bytes(site.hardware.disk_rate)}/s"
    )


def _reference(s: Setup, seq: Sequences) -> Phase:
    """A third of a training step's work per pair, once."""
    one = step_time(s, seq.work(s.micro)).compute_s / s.accumulation
    seconds = seq.rows / (s.micro * s.world) * one / 3
    return Phase(name="reference", seconds=seconds, why="reference log-probs of every pair")


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


def publishing(s: Setup, site: Site) -> Phase:
    size = result_bytes(s)
    if not site.publishes:
        return Phase(name="finish", seconds=10 + size / WRITE_RATE, why="moving the result into place")
    seconds = PUBLISH_S + size * UPLOAD_SLACK / site.hardware.upload_rate
    why = f"{show_bytes(size)} at {show_bytes(site.hardware.upload_rate)}/s"
    return Phase(name="publish", seconds=seconds, why=why)
