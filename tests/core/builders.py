"""Small, complete facts and plans for tests of the planner."""

from __future__ import annotations

from typing import Any

from core.data.facts import DatasetFacts, LengthStats
from core.domain.choices import Engine, LrSchedule, Method, Optimizer, Parallelism
from core.domain.hardware import MOST_GPUS, Hardware, parse_gpus
from core.domain.records import Confidence
from core.domain.tasks import TaskType
from core.models.facts import Family, ModelFacts
from core.planning.budget import MemoryBreakdown, MemoryTerm, PlanVerdict, TimeBreakdown, TimelinePhase
from core.planning.candidate import ImageCandidate, LossKind, RunCandidate, nccl_buffer, shape_of
from core.planning.conditions import JobConditions
from core.planning.plan import (
    AdapterPlan,
    BatchPlan,
    LaunchPlan,
    OptimizerPlan,
    PlanReason,
    SequencePlan,
    StepsPlan,
    TaskSpec,
    TrainingPlan,
)
from core.profile.limits import ContainerTargets, ProfileLimits
from core.profile.schema import EngineConfigs, ResolvedProfile
from core.profile.targets import Targets


def llama_8b(**changes: Any) -> ModelFacts:
    shape: dict[str, Any] = {
        "model_id": "meta-llama/Llama-3.1-8B",
        "family": Family.LLAMA,
        "architecture": "llama",
        "params_total": 8_030_261_248,
        "params_active": 8_030_261_248,
        "layers": 32,
        "hidden": 4096,
        "intermediate": 14336,
        "heads": 32,
        "kv_heads": 8,
        "head_dim": 128,
        "vocab": 128_256,
        "max_position": 131_072,
        "tied_embeddings": False,
        "sources": {"layers": Confidence.CONFIG},
    }
    return ModelFacts(**{**shape, **changes})


def instruct_data(rows: int = 20_000) -> DatasetFacts:
    prompt = LengthStats.from_lengths(range(50, 450))
    answer = LengthStats.from_lengths(range(20, 220))
    total = LengthStats.from_lengths(range(70, 670))
    return DatasetFacts(
        task_type=TaskType.INSTRUCT,
        rows=rows,
        rows_confidence=Confidence.GIVEN,
        lengths_confidence=Confidence.CONFIG,
        sampled_rows=400,
        prompt=prompt,
        answer=answer,
        total=total,
    )


def plan(**changes: Any) -> TrainingPlan:
    """A feasible LoRA plan of Llama 3.1 8B on 4 H100."""
    gpus = parse_gpus("4xH100")
    whole: dict[str, Any] = {
        "task": TaskSpec(task_type=TaskType.INSTRUCT, hours=3),
        "model": llama_8b(),
        "data": instruct_data(),
        "gpus": gpus,
        "profile": resolved(name="h100x4"),
        "targets": Targets(),
        "engine": Engine.AXOLOTL,
        "method": Method.LORA,
        "adapter": AdapterPlan(rank=64, alpha=32, dropout=0.05, params=168_000_000),
        "parallelism": Parallelism.DDP,
        "batch": BatchPlan(micro=8, accumulation=1, world_size=4),
        "sequence": SequencePlan(length=1024, packing=True, per_epoch=7000, tokens_per_epoch=7_168_000),
        "optimizer": OptimizerPlan(
            name=Optimizer.ADAMW_TORCH_FUSED, learning_rate=3e-4, schedule=LrSchedule.COSINE, warmup_steps=10
        ),
        "steps": StepsPlan(epochs=2, per_epoch=219, total=438, eval_every=40, save_every=40),
        "launch": LaunchPlan(processes=4),
        "memory": MemoryBreakdown(
            phase="backward",
            terms=(MemoryTerm(name="weights", bytes=16_060_522_496, why="8.03B in bf16"),),
            budget_bytes=75_000_000_000,
            capacity_bytes=gpus.memory_bytes,
        ),
        "time": TimeBreakdown(
            phases=(TimelinePhase(name="load", seconds=60), TimelinePhase(name="train", seconds=4000.5)),
            deadline_s=10_800,
            reserve_s=600,
            step_s=9.1,
            throughput=31_000.25,
            utilisation=0.28,
        ),
        "verdict": PlanVerdict(feasible=True),
        "reasons": {"batch.micro": PlanReason(text="as asked", source="h100x4.yaml:12")},
    }
    whole |= changes
    hardware = Hardware(gpus=whole.pop("available", gpus))
    whole = {"conditions": JobConditions(hardware), **whole}
    whole.setdefault("candidate", _candidate(TrainingPlan.model_construct(**whole)))
    return TrainingPlan(**whole)


def resolved(limits: dict[str, Any] | None = None, name: str = "test", **targets: Any) -> ResolvedProfile:
    """A profile of these targets alone, everything else at its default."""
    return ResolvedProfile(
        name=name,
        digest="",
        hardware=None,
        targets=Targets(**targets),
        limits=ProfileLimits.model_construct(**{**ProfileLimits().model_dump(), **(limits or {})}),
        container=ContainerTargets(),
        env={},
        engine_config=EngineConfigs(),
        sections=(),
        origins={},
        before_scale={},
    )


def _candidate(plan: TrainingPlan) -> RunCandidate:
    """The numbers of a plan whose parts a test has chosen."""
    adapter, precision, image = plan.adapter, plan.precision, plan.image
    return RunCandidate(
        task=plan.task.task_type,
        engine=plan.engine,
        method=plan.method,
        shape=shape_of(plan.model),
        kind=plan.gpus.kind,
        world=plan.batch.world_size,
        node_gpus=MOST_GPUS if plan.available.nodes == 1 else plan.available.per_node,
        network=plan.launch.network,
        parallelism=plan.parallelism,
        nccl_buffer=nccl_buffer({}),
        hybrid=bool(plan.fsdp and plan.fsdp.within_nodes),
        micro=plan.batch.micro,
        accumulation=plan.batch.accumulation,
        eval_micro=plan.batch.eval_micro,
        length=plan.sequence.length,
        completion=plan.sequence.completion_limit or 0,
        rank=adapter.rank if adapter else 0,
        dropout=bool(adapter and adapter.dropout),
        optimizer=plan.optimizer.name,
        fp32_master=plan.optimizer.fp32_master,
        width=2 if precision.bf16 or precision.fp16 else 4,
        checkpointing=precision.gradient_checkpointing,
        attention=precision.attention,
        loss=LossKind.CHUNKED,
        liger=frozenset(),
        reshard=True,
        compile_mode=precision.compile_mode,
        fp8=precision.fp8,
        reference_ready=False,
        vllm_share=0.0,
        vllm_sleep=False,
        generations=plan.targets.grpo_generations,
        kl=False,
        prompt_kl=False,
        together=0,
        gathered_layers=0,
        ema=plan.ema is not None,
        image=None
        if image is None or plan.model.image is None
        else ImageCandidate(
            plan.model.image, image.resolutions, image.vae_batch, image.cache_text, False, False
        ),
    )
