"""Time that a job spends beside training: making rows, fetching, preparing, loading, saving, publishing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from core.data.facts import DatasetFacts
from core.domain.choices import CompileMode, Engine, Parallelism
from core.domain.cores import job_cores
from core.domain.hardware import Device
from core.domain.units import show_bytes, show_seconds
from core.models.facts import ModelFacts
from core.planning.budget import TimelinePhase
from core.planning.candidate import RunCandidate
from core.planning.conditions import JobConditions
from core.planning.memory.persistent import STATE_BYTES
from core.planning.plan import TaskSpec
from core.planning.time.sequences import Sequences
from core.planning.time.speed import step_time

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
#: Images: encoding one with the VAE at each resolution, and its caption, on any GPU.
ENCODE_S = 0.5
#: ai-toolkit and sd-scripts before their first step, beside loading: moving and quantising the base, encoding
#: captions. Winners count with 478 to 525 s outside the steps, start, saves and reserve together.
IMAGE_START_S = 150.0


class PhaseEstimate(NamedTuple):
    """A phase during the search; its text is only made when a plan is written."""

    name: str
    seconds: float
    why: Callable[[], str]

    def described(self) -> TimelinePhase:
        return TimelinePhase(name=self.name, seconds=self.seconds, why=self.why())


def opening_phases(
    s: RunCandidate, seq: Sequences, model: ModelFacts, data: DatasetFacts, conditions: JobConditions
) -> list[PhaseEstimate]:
    """Everything before the first step, in order."""
    phases = []
    if not conditions.model_cached:
        size = model.stored_bytes
        rate = conditions.hardware.download_rate
        phases.append(PhaseEstimate("download", 5.0 + size / rate, lambda: _at_rate(size, rate)))
    phases.append(_starting(s))
    phases.append(_preparing(s, data, conditions))
    phases.append(_loading(s, model, conditions))
    mode = s.compile_mode
    if mode is not None and s.kind.device is Device.CUDA:
        phases.append(PhaseEstimate("compile", COMPILE_S[mode], lambda: mode.value))
    if s.task.has_pairs and s.reference_ready:
        phases.append(_reference(s, seq))
    return phases


def _at_rate(size: float, rate: float) -> str:
    return f"{show_bytes(size)} at {show_bytes(rate)}/s"


def _starting(s: RunCandidate) -> PhaseEstimate:
    cpu = s.kind.device is Device.CPU
    seconds = STARTUP_CPU_S if cpu else STARTUP_S + STARTUP_PER_GPU_S * s.on_node
    if s.image is not None and s.engine is not Engine.PICTURES and not cpu:
        seconds += IMAGE_START_S
    return PhaseEstimate("start", seconds, lambda: f"imports, {s.world} process{'es' if s.world > 1 else ''}")


def _preparing(s: RunCandidate, data: DatasetFacts, conditions: JobConditions) -> PhaseEstimate:
    if s.image is not None:
        sides = len(s.image.resolutions) if s.engine is Engine.AI_TOOLKIT else 1
        why = f"{data.rows} images to latents"
        encoding = 5 + ENCODE_S * data.rows * sides
        if s.engine is Engine.PICTURES:  # reads the encoders for it, which are off the GPU afterwards
            why += ", captions to embeddings"
            encoding += s.image.facts.text_encoder_params * 2 / conditions.hardware.disk_rate
        return PhaseEstimate("prepare", encoding, lambda: why)
    workers = min(job_cores(conditions.hardware, s.on_node), MOST_WORKERS)
    tokens = data.rows * (data.total.mean + (data.rejected.mean if data.rejected else 0))
    seconds = 3 + data.rows / (ROWS_PER_CORE * workers) + tokens / (TOKENS_PER_CORE * workers)
    return PhaseEstimate("prepare", seconds, lambda: f"tokenising {data.rows:,} rows on {workers} cores")


def _loading(s: RunCandidate, model: ModelFacts, conditions: JobConditions) -> PhaseEstimate:
    """Ranks of one host read the same pages, or each its shards; Axolotl's also send them to each other."""
    size, rate = model.stored_bytes, conditions.hardware.disk_rate
    if s.image is not None and s.image.twin:
        size += s.image.facts.backbone_params
    sent = s.parallelism is Parallelism.FSDP and s.engine is not Engine.NATIVE
    seconds = 5 + size / rate * (1.5 if sent else 1.0)
    return PhaseEstimate("load", seconds, lambda: _at_rate(size, rate))


def _reference(s: RunCandidate, seq: Sequences) -> PhaseEstimate:
    """A third of a training step's work per pair, once."""
    per_pass = step_time(s, seq.work(s.micro)).compute_s / s.accumulation
    seconds = seq.rows / (s.micro * s.world) * per_pass / 3
    return PhaseEstimate("reference", seconds, lambda: "reference log-probs of every pair")


def result_bytes(s: RunCandidate) -> int:
    """Bytes of what is submitted: the adapter, or the whole model."""
    if s.full:
        return s.shape.params * 2
    return s.adapter_params * (s.trained_width if s.image is None else 2)


def checkpoint_bytes(s: RunCandidate) -> int:
    """A checkpoint to resume from: the result and the optimizer's states."""
    fp32, bf16 = STATE_BYTES[s.optimizer]
    states = fp32 if s.trained_width == 4 else bf16
    return result_bytes(s) + (0 if s.image is not None else round(s.trained_params * states))


def checkpoint_space(s: RunCandidate, model: ModelFacts, conditions: JobConditions) -> float:
    """Disk that checkpoints may fill: what is free, less the submission and a model still to download."""
    free = conditions.hardware.disk_free_bytes
    if free is None:
        return math.inf
    return float(max(free - result_bytes(s) - (0 if conditions.model_cached else model.stored_bytes), 0))


def save_seconds(s: RunCandidate) -> float:
    """A checkpoint and the submission beside it."""
    return SAVE_PAUSE_S + (checkpoint_bytes(s) + result_bytes(s)) / WRITE_RATE


def publish_phase(s: RunCandidate, conditions: JobConditions) -> PhaseEstimate:
    size = result_bytes(s)
    if not conditions.publishes:
        return PhaseEstimate("finish", 10 + size / WRITE_RATE, lambda: "moving the result into place")
    rate = conditions.hardware.upload_rate
    return PhaseEstimate("publish", PUBLISH_S + size * UPLOAD_SLACK / rate, lambda: _at_rate(size, rate))


#: Up to so many parameters, so much of the time: a larger model trains on fewer rows in the rest of it. As an
#: entry of 2026-09 has it.
ROWS_TIME: tuple[tuple[float, float], ...] = ((2e9, 0.25), (4e9, 0.20), (6e9, 0.15), (math.inf, 0.12))


def making_rows_share(params: int) -> float:
    return next(share for most, share in ROWS_TIME if params < most)


def making_rows_phases(task: TaskSpec, model: ModelFacts, conditions: JobConditions) -> list[PhaseEstimate]:
    """Return the phase, or nothing for a task that has its rows or whose rows are made already."""
    if not task.task_type.makes_rows or conditions.rows_made:
        return []
    share, cores = making_rows_share(model.params_total), conditions.hardware.cpu_cores
    seconds = share * task.hours * 3600
    why = f"rows are made for {show_seconds(seconds)} at most, {share:.0%} of the time, on {cores} cores"
    return [PhaseEstimate("generate", seconds, lambda: why)]
