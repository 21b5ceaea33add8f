"""Plans that are made here: for a run that has none, and for a retry after a failure.

A tournament's container sees its GPUs, cores, memory and disk first now; a daemon sends a plan along.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from core.data.facts import DatasetFacts
from core.domain.choices import Engine
from core.domain.hardware import CPU, GpuKind, GpuSet, Hardware, from_nvml
from core.domain.job_states import END_MEANINGS, EndReason, RetryRule
from core.domain.units import show_seconds
from core.models.facts import ModelFacts
from core.models.identify import facts_from_config
from core.planning.baseline_stats import (
    BadStats,
    read_baseline_stats,
    slowness_of,
    speed_text,
)
from core.planning.conditions import JobConditions
from core.planning.oom import OutOfMemory, next_after_oom
from core.planning.plan import TaskSpec, TrainingPlan
from core.planning.planner import plan_task as make_plan
from core.planning.planner import replan
from core.profile.resolve import load_profile, resolve_profile
from core.runs.remedies import (
    GOOD_ENDS,
    REASON_OF_RUN_END,
    AttemptFailure,
    can_resume,
    forced_feasible,
    retry_allowed,
    workarounds_after,
)
from core.runs.run_files import RunEnd, RunSpec
from core.system.resources import usable_cores, usable_memory
from trainer.errors import BadModel, UnusableGpu

log = logging.getLogger(__name__)

DEVICES = Path("/dev")


def detect_machine(disk: Path) -> Hardware:
    """Return the resources that the container's limits allow; `disk` is where checkpoints will lie."""
    return Hardware(
        gpus=visible_gpus(),
        cpu_cores=usable_cores(),
        memory_bytes=usable_memory(),
        disk_free_bytes=shutil.disk_usage(disk).free,
    )


def visible_gpus() -> GpuSet:
    """From torch where it is installed, which sees what the engine will see; else from the driver's library.
    Of several kinds of GPU: those with the most memory."""
    kinds = _by_torch() if importlib.util.find_spec("torch") else _by_driver()
    if not kinds:
        return GpuSet(kind=CPU, count=1)
    best = max(kinds, key=attrgetter("memory_bytes"))
    same_kind = [kind for kind in kinds if kind.name == best.name]
    return GpuSet(kind=min(same_kind, key=attrgetter("memory_bytes")), count=len(same_kind))


def unusable_gpus() -> list[str]:
    """GPUs of this container, for when none of them can be used: mostly the driver is too old for the image.
    On a CPU no task is done in its time; with an error at once, somebody can help."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1", "NoDevFiles"):
        return []
    return sorted(path.name for path in DEVICES.glob("nvidia[0-9]*"))


def _by_torch() -> list[GpuKind]:
    import torch

    if not torch.cuda.is_available():
        return []
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [
        from_nvml(gpu.name, int(gpu.total_memory), (int(gpu.major), int(gpu.minor))) for gpu in properties
    ]


def _by_driver() -> list[GpuKind]:
    """Without torch: an image engine's own is in another interpreter."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # noqa: BLE001 - no library, no driver, no permission: no GPU
        log.info("no GPU: %s", error)
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(at) for at in range(pynvml.nvmlDeviceGetCount())]
        return [_kind_of(pynvml, handle) for handle in _visible(handles)]
    finally:
        pynvml.nvmlShutdown()


def _kind_of(pynvml: Any, handle: Any) -> GpuKind:
    name = pynvml.nvmlDeviceGetName(handle)
    total = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return from_nvml(name if isinstance(name, str) else name.decode(), total, (int(major), int(minor)))


def _visible(handles: list[Any]) -> list[Any]:
    """Filter the container's GPUs to those that CUDA may use."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return handles
    chosen = [int(index) for index in named.split(",") if index.strip().isdigit()]
    return [handles[at] for at in chosen if at < len(handles)]


#: Which profile a run that plans for itself follows, by name or path.
PROFILE_VARIABLE = "GOD_MINER_PROFILE"
PROFILE, PROFILE_CPU = "steady", "cpu-demo"


def model_facts(folder: Path, model_id: str) -> ModelFacts:
    """By the model's own config and the size of its weights: names may be made up in tournaments."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BadModel(f"{folder / 'config.json'} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise BadModel(f"{folder / 'config.json'} holds no object")
    return facts_from_config(config, model_id)


def make_own_plan(
    run: RunSpec,
    model: ModelFacts,
    data: DatasetFacts,
    engines: Collection[Engine] = (),
    *,
    rows_made: bool = True,
    pictures: bool = False,
) -> TrainingPlan:
    """The plan; with `engines` given, for one of those that this image has; with `pictures`, for the picture
    trainer, where the family is scored. Environments are planned for
    before their rows are made, and again afterwards."""
    hardware = detect_machine(Path(run.work_dir))
    # Not for pictures: their engines have a torch of their own, which may see more than we do.
    if hardware.gpus.is_cpu and run.task_type.is_text and (gpus := unusable_gpus()):
        raise UnusableGpu(f"{', '.join(gpus)} cannot be used: look at the driver's version (nvidia-smi)")
    spec = TaskSpec(
        task_type=run.task_type,
        image_type=run.image_type,
        trigger_word=run.trigger_word,
        hours=max(run.deadline_at - time.time(), 0.0) / 3600,
        task_id=run.task_id,
        kl_coefficient=run.kl_coefficient,
    )
    name = os.environ.get(PROFILE_VARIABLE) or (PROFILE_CPU if hardware.gpus.is_cpu else PROFILE)
    profile = resolve_profile(load_profile(name), run.task_type, model, data.pictures)
    if engines and profile.targets.engine not in engines:
        # Flux trains with either image engine, and validators' rules differ on the image that it gets.
        targets = profile.targets.model_copy(update={"engine": next(iter(engines))})
        profile = profile.model_copy(update={"targets": targets})
    own = profile.for_tournament(run.deadline_at - run.end_by)
    conditions = JobConditions(
        hardware,
        model_cached=True,
        publishes=False,
        vllm=importlib.util.find_spec("vllm") is not None,
        flash_3=importlib.util.find_spec("flash_attn_interface") is not None,
        era=run.era,
        rows_made=rows_made,
        pictures=pictures,
    )
    plan = make_plan(spec, model, data, hardware, own, conditions=conditions)
    if run.baseline_stats_path is not None:
        conditions = _as_measured(plan, Path(run.baseline_stats_path))
        plan = make_plan(spec, model, data, hardware, own, conditions=conditions)
    return forced_feasible(plan)


def _as_measured(plan: TrainingPlan, path: Path) -> JobConditions:
    """Add what the validator has measured, where its file says so."""
    try:
        stats = read_baseline_stats(path)
    except BadStats as error:
        return replace(plan.conditions, notes=(f"the validator's statistics are ignored: {error}",))
    slowness = slowness_of(plan, stats)
    return replace(
        plan.conditions,
        slowness=slowness or 1.0,
        weight_rms=stats.weight_rms,
        notes=() if slowness is None else (speed_text(stats, slowness),),
    )


#: What must be left for another try: the time that the last one took to begin, this many times over.
WORTH = 2.0


@dataclass(frozen=True)
class FailedLaunch:
    """A failed launch, as far as the choice of a remedy needs it."""

    end: RunEnd
    moment: str | None
    #: From the launch to the first step, or to the failure where there was none.
    start_s: float
    #: From now to the end of the last save.
    left_s: float
    #: What the failure said of itself.
    detail: str = ""


@dataclass(frozen=True)
class Remedy:
    after: EndReason
    plan: TrainingPlan
    #: Whether the next training can go on from the last checkpoint.
    resumes: bool
    change: str
    #: What the failure said of itself.
    detail: str = ""

    def __str__(self) -> str:
        return f"after {self.after}: {self.change}"


def remedy_for(plan: TrainingPlan, failed: FailedLaunch, earlier: Sequence[Remedy]) -> Remedy | None:
    """Return a remedy, or None if nothing would help or finish in time."""
    reason = REASON_OF_RUN_END[failed.end]
    if failed.end in GOOD_ENDS or failed.left_s < WORTH * failed.start_s:
        return None
    if END_MEANINGS[reason].retry is RetryRule.WAIT:  # nobody frees a disk while the container runs
        return None
    failure = AttemptFailure(reason, failed.detail)
    if not retry_allowed([*(AttemptFailure(remedy.after, remedy.detail) for remedy in earlier), failure]):
        return None
    hours = (failed.left_s + plan.time.reserve_s) / 3600
    if reason is EndReason.OOM:
        oom = OutOfMemory(moment=failed.moment or "train", available=plan.available.count)
        smaller = next_after_oom(plan, oom, hours)
        if smaller is None:
            return None
        change = smaller.oom_steps[-1]
        # The estimate of the time is a guess, and what is left was compared already.
        smaller = forced_feasible(smaller, max(plan.steps.total, 1))
        return Remedy(reason, smaller, can_resume(plan, smaller, reason), change)
    workarounds = workarounds_after(plan, failure)
    if workarounds == plan.conditions.workarounds:
        change = f"once more, {show_seconds(failed.left_s)} are left"
        return Remedy(reason, plan, can_resume(plan, plan, reason), change, failed.detail)
    changed = forced_feasible(replan(plan, replace(plan.conditions, workarounds=workarounds), hours))
    return Remedy(reason, changed, can_resume(plan, changed, reason), workarounds.notes[-1], failed.detail)
