"""Write the plan of the chosen candidate: every number, and the reason for each.

That includes the host around the GPUs: loader processes, the container's limits, the launch.
"""

from __future__ import annotations

from collections.abc import Iterator

from core.domain.choices import Engine, Method, Parallelism
from core.domain.cores import cores_in, cores_of_job, job_cores, sharing_gpus
from core.domain.evaluation import evaluation_rules
from core.domain.hardware import Hardware
from core.domain.units import show_bytes
from core.models.shapes import linear_shapes, matches, module_names
from core.models.tool_parsers import parser_for
from core.planning.budget import Concession, PlanVerdict, TimeBreakdown, conceded
from core.planning.candidate import RunCandidate
from core.planning.measured import prior_source
from core.planning.memory.peak import memory_of
from core.planning.optimizer import (
    ema_plan,
    guarded_rate,
    learning_concessions,
    lora_alpha,
    optimizer_plan,
    plateau_plan,
    search_plan,
    warmup,
)
from core.planning.plan import (
    AdapterPlan,
    BatchPlan,
    ContainerPlan,
    DpoPlan,
    FsdpPlan,
    GoalPlan,
    GrpoPlan,
    ImagePlan,
    LaunchPlan,
    LoaderPlan,
    LrSearchPlan,
    PrecisionPlan,
    SequencePlan,
    StepsPlan,
    TrainingPlan,
)
from core.planning.search.fit import SearchResult, budget_of
from core.planning.search.requirements import Requirements
from core.planning.search.timed_candidate import TimedCandidate
from core.planning.tradeoffs import adapter_reach, concessions, epochs_between_files, no_fp8, reasons_for
from core.profile.declare import EngineCase
from core.profile.explain import annotations_for
from core.profile.limits import ContainerTargets
from core.profile.schema import ResolvedProfile

#: The host memory of one loader process, and the part of the host that all of them may take.
WORKER_BYTES, WORKERS_SHARE = 0.5e9, 0.25
#: Shared memory per GPU where the profile names none, and the part of the host that it may take.
SHM_PER_GPU, SHM_SHARE = 16e9, 0.5
#: GRPO: below this part of the prompts the plan says so.
ENOUGH_PROMPTS = 0.3
#: The container may not take the whole host: the daemon lives there too.
CONTAINER_SHARE = 0.95


def loader_plan(needs: Requirements, hardware: Hardware, world: int) -> LoaderPlan:
    targets, native = needs.targets, needs.engine is Engine.NATIVE
    workers = 0 if native else loader_workers(needs, hardware, world)  # native: one thread of its own
    return LoaderPlan(
        workers=workers,
        pin_memory=targets.dataloader_pin_memory and not hardware.gpus.is_cpu,
        prefetch_factor=targets.dataloader_prefetch_factor if workers or native else None,
        persistent_workers=targets.dataloader_persistent_workers and workers > 0,
        drop_last=targets.dataloader_drop_last and not native,
    )


def loader_workers(needs: Requirements, hardware: Hardware, world: int) -> int:
    """Return the loader workers of one process."""
    by_memory = int(_process_memory(hardware, world) * WORKERS_SHARE / WORKER_BYTES)
    cores, asked = _process_cores(needs, hardware, world), needs.targets.dataloader_num_workers
    most = needs.conditions.workarounds.loader_workers
    return min(asked, cores, max(by_memory, 1), asked if most is None else most)


def _process_cores(needs: Requirements, hardware: Hardware, world: int) -> int:
    share = cores_of_job(needs.profile.container.cpus, hardware, world)
    return max((len(cores_in(share)) if share else job_cores(hardware, world)) // world, 1)


def _process_memory(hardware: Hardware, world: int) -> float:
    return hardware.memory_bytes / sharing_gpus(hardware, world)


def container_plan(asked: ContainerTargets, hardware: Hardware, world: int) -> ContainerPlan:
    part = world / sharing_gpus(hardware, world)
    memory = int(hardware.memory_bytes * CONTAINER_SHARE * part)
    shm = asked.shm or int(SHM_PER_GPU * world)
    return ContainerPlan(
        memory_bytes=min(asked.memory or memory, memory),
        shm_bytes=min(shm, int(hardware.memory_bytes * SHM_SHARE * part)),
        cpus=cores_of_job(asked.cpus, hardware, world),
    )


def host_concessions(needs: Requirements, hardware: Hardware, world: int) -> Iterator[Concession]:
    workers, asked = loader_workers(needs, hardware, world), needs.targets.dataloader_num_workers
    limited = needs.conditions.workarounds.loader_workers is None
    if workers < asked and limited and needs.engine is not Engine.NATIVE:
        cores, memory = _process_cores(needs, hardware, world), _process_memory(hardware, world)
        reason = f"{cores} cores and {show_bytes(memory)} of the host for each process"
        yield conceded("dataloader_num_workers", asked, workers, reason)
    yield from container_concessions(needs.profile.container, hardware, world)


def container_concessions(wanted: ContainerTargets, hardware: Hardware, world: int) -> Iterator[Concession]:
    got, sharing = container_plan(wanted, hardware, world), sharing_gpus(hardware, world)
    host = f"the host has {show_bytes(hardware.memory_bytes)}, and {world} of {sharing} GPUs "
    if wanted.memory and got.memory_bytes != wanted.memory:
        asked, given = show_bytes(wanted.memory), show_bytes(got.memory_bytes or 0)
        yield conceded("container.memory", asked, given, f"{host}have their share of it")
    if wanted.shm and got.shm_bytes != wanted.shm:
        asked, given = show_bytes(wanted.shm), show_bytes(got.shm_bytes or 0)
        yield conceded("container.shm", asked, given, f"{host}have their share of half of it")
    if wanted.cpus and got.cpus and cores_in(got.cpus) != cores_in(wanted.cpus):
        yield conceded("container.cpus", wanted.cpus, got.cpus, _why_these_cores(hardware, world))


def _why_these_cores(hardware: Hardware, world: int) -> str:
    gpus = len(hardware.near_cores) or sharing_gpus(hardware, world)
    if world >= gpus:
        return f"the host has {hardware.cpu_cores} cores"
    near = ", those near them first" if any(hardware.near_cores) else ""
    return f"{world} of {gpus} GPUs have their share{near}; jobs on the others have the rest"


def assemble_plan(
    needs: Requirements, result: SearchResult, profile: ResolvedProfile, explained: bool = True
) -> TrainingPlan:
    """Write the plan. `explained=False` leaves out what only a reader needs: notes and reasons."""
    timed, candidate = result.best, result.best.candidate
    targets, hardware = needs.targets, needs.conditions.hardware
    gpus = hardware.gpus.take(candidate.world)
    budget = budget_of(needs)
    rate, _, _ = guarded_rate(needs, timed)
    warmup_steps, _ = warmup(needs, timed.schedule.total)
    search = search_plan(needs, timed, rate)
    conceded_targets = [
        *concessions(needs, result, budget),
        *learning_concessions(needs, timed),
        *_nodes(needs, hardware),
        *host_concessions(needs, hardware, gpus.per_node),
    ]
    return TrainingPlan(
        task=needs.task,
        model=needs.model,
        data=needs.data,
        gpus=gpus,
        profile=profile,
        conditions=needs.conditions,
        candidate=candidate,
        targets=targets,
        engine=needs.engine,
        method=candidate.method,
        adapter=_adapter(needs, candidate),
        parallelism=candidate.parallelism,
        fsdp=_fsdp(candidate),
        batch=_batch(candidate),
        sequence=_sequence(needs, timed),
        optimizer=optimizer_plan(needs, timed, rate, warmup_steps),
        steps=_steps(needs, timed),
        precision=_precision(needs, candidate),
        loader=loader_plan(needs, hardware, gpus.per_node),
        ema=ema_plan(needs, candidate),
        plateau=plateau_plan(needs),
        lr_search=search,
        dpo=_dpo(needs, candidate),
        grpo=_grpo(needs, candidate),
        image=_image(needs, timed),
        goal=_goal(needs),
        container=container_plan(needs.profile.container, hardware, gpus.per_node),
        slurm=needs.profile.slurm.by_name(),
        env=_environment(needs, candidate),
        launch=LaunchPlan(
            processes=candidate.world,
            machines=gpus.nodes,
            network=candidate.network,
            port=targets.main_process_port,
            exclusive=needs.learned.exclusive,
        ),
        engine_config=_raw(needs),
        memory=memory_of(candidate, budget),
        time=_time(timed),
        verdict=PlanVerdict(feasible=result.code is None, code=result.code, reason=result.reason),
        concessions=tuple(conceded_targets),
        notes=tuple(_notes(needs, timed, search)) if explained else (),
        reasons=reasons_for(needs, result, conceded_targets) if explained else {},
    )


#: Settings of torch's allocator, under its old and its new name, and the one that vLLM refuses to sleep with.
_ALLOCATOR, _EXPANDABLE = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), "expandable_segments:True"


def _environment(needs: Requirements, candidate: RunCandidate) -> dict[str, str]:
    environment = dict(needs.profile.env)
    if candidate.vllm_share and candidate.vllm_sleep:
        for name in _ALLOCATOR:
            kept = [one for one in environment.pop(name, "").split(",") if one and one != _EXPANDABLE]
            if kept:
                environment[name] = ",".join(kept)
    return environment


def _nodes(needs: Requirements, hardware: Hardware) -> Iterator[Concession]:
    """`nodes` is a maximum: only what cannot be had is a concession."""
    asked, there = needs.targets.nodes, hardware.gpus.nodes
    if needs.most_nodes < asked:
        yield conceded("nodes", asked, needs.most_nodes, f"{needs.task.task_type} trains on one node")
    elif there < asked:
        reason = (
            "one node with such GPUs is there" if there == 1 else f"{there} nodes with such GPUs are there"
        )
        yield conceded("nodes", asked, there, reason)
    elif asked > 1 and (most := needs.limits.max_gpus // hardware.gpus.per_node) < asked:
        yield conceded("nodes", asked, max(most, 1), f"limits.max_gpus is {needs.limits.max_gpus}")


def _adapter(needs: Requirements, candidate: RunCandidate) -> AdapterPlan | None:
    if candidate.method is Method.FULL:
        return None
    targets = needs.targets
    return AdapterPlan(
        rank=candidate.rank,
        alpha=lora_alpha(needs, candidate.rank),
        dropout=targets.lora_dropout,
        rank_pattern={
            pattern: max(round(factor * candidate.rank), 1) for pattern, factor in needs.rank_factors
        },
        text_encoder=bool(candidate.image and candidate.image.text_adapter),
        params=candidate.adapter_params,
    )


def _fsdp(candidate: RunCandidate) -> FsdpPlan | None:
    if candidate.parallelism is not Parallelism.FSDP:
        return None
    return FsdpPlan(within_nodes=candidate.hybrid)


def _batch(candidate: RunCandidate) -> BatchPlan:
    return BatchPlan(
        micro=candidate.micro,
        accumulation=candidate.accumulation,
        world_size=candidate.world,
        eval_micro=candidate.eval_micro,
    )


def _sequence(needs: Requirements, timed: TimedCandidate) -> SequencePlan:
    seq = timed.seq
    return SequencePlan(
        length=seq.length,
        packing=seq.packing,
        group_by_length=needs.targets.group_by_length and not seq.packing and not needs.model.is_image,
        pad_to_length=seq.packing,
        prompt_limit=seq.prompt_limit,
        completion_limit=seq.completion_limit,
        dropped_share=min(max(seq.dropped_share, 0.0), 1.0),
        per_epoch=seq.per_epoch,
        tokens_per_epoch=round(seq.per_epoch * (seq.length if needs.model.is_image else seq.padded)),
    )


def _steps(needs: Requirements, timed: TimedCandidate) -> StepsPlan:
    schedule, targets = timed.schedule, needs.targets
    return StepsPlan(
        epochs=schedule.epochs,
        per_epoch=schedule.per_epoch,
        total=schedule.total,
        wanted=schedule.wanted,
        eval_every=schedule.eval_every,
        save_every=schedule.save_every,
        log_every=max(min(schedule.total // 100, 10), 1),
        eval_rows=schedule.eval_rows,
        eval_metric=targets.eval_metric,
        keep_checkpoints=schedule.keep,
        early_stopping_patience=targets.early_stopping_patience if schedule.eval_rows else None,
        load_best=targets.load_best and schedule.eval_rows > 0,
    )


def _precision(needs: Requirements, candidate: RunCandidate) -> PrecisionPlan:
    targets, kind, supervised = needs.targets, needs.kind, needs.task.task_type.is_supervised
    half = targets.bf16 and not kind.has_bf16
    return PrecisionPlan(
        bf16=targets.bf16 and kind.has_bf16,
        fp16=targets.fp16 or half,
        tf32=targets.tf32 and kind.compute_capability >= (8, 0),
        fp8=candidate.fp8 and no_fp8(candidate) is None,
        attention=candidate.attention,
        compile_mode=candidate.compile_mode,
        gradient_checkpointing=candidate.checkpointing,
        # The KL to the base model is computed from the logits, which a fused loss never has.
        fused_loss=targets.fused_loss and supervised and not needs.task.kl_coefficient,
        liger=bool(needs.liger),
        lora_kernels=needs.lora_kernels and candidate.method is not Method.FULL,
    )


def _dpo(needs: Requirements, candidate: RunCandidate) -> DpoPlan | None:
    if not needs.task.task_type.has_pairs:
        return None
    return DpoPlan(precompute_reference=candidate.reference_ready)


def _grpo(needs: Requirements, candidate: RunCandidate) -> GrpoPlan | None:
    if not needs.task.task_type.generates:
        return None
    targets, rules = needs.targets, evaluation_rules(needs.conditions.era)
    share = {"vllm_memory_share": candidate.vllm_share} if candidate.vllm_share else {}
    return GrpoPlan(
        temperature=targets.grpo_temperature or rules.grpo_temperature,
        top_k=rules.grpo_top_k,
        vllm=candidate.vllm_share > 0,
        vllm_sleep=candidate.vllm_share > 0 and candidate.vllm_sleep,
        whole_layers=candidate.gathered_layers if candidate.gathers_to_generate else 0,
        together=candidate.together or None,
        **share,
    )


def _goal(needs: Requirements) -> GoalPlan | None:
    goal = GoalPlan(loss=needs.targets.target_loss, gain=needs.targets.target_gain)
    return goal if goal != GoalPlan() else None


def _image(needs: Requirements, timed: TimedCandidate) -> ImagePlan | None:
    image, targets = timed.candidate.image, needs.targets
    if image is None:
        return None
    return ImagePlan(
        resolutions=image.resolutions,
        repeats=targets.image_repeats or needs.data.image_repeats,
        vae_batch=image.vae_batch,
        caption_dropout=0.0 if image.text_offloaded else targets.caption_dropout,
        cache_text=image.text_offloaded,
        quantize_base=image.quantized,
        recipe=needs.recipe and needs.recipe.model_copy(update=_changed(timed.candidate)),
        twin=image.twin,
        save_every_epochs=epochs_between_files(timed),
    )


def _changed(candidate: RunCandidate) -> dict[str, object]:
    """Return what memory may change of a recipe."""
    return {"rank": candidate.rank, "checkpointing": candidate.checkpointing}


def _raw(needs: Requirements) -> dict[str, object]:
    keys: dict[str, object] = getattr(needs.profile.engine_config, needs.engine.name.lower())
    return keys


def _time(timed: TimedCandidate) -> TimeBreakdown:
    """From now to the deadline."""
    candidate = timed.candidate
    peak = timed.step.flops / (timed.rate.step_s * candidate.kind.bf16_flops) if timed.rate.step_s else 0.0
    return TimeBreakdown(
        phases=tuple(phase.described() for phase in timed.phases),
        deadline_s=timed.deadline_s,
        reserve_s=timed.reserve_s,
        step_s=timed.rate.step_s,
        throughput=candidate.effective * timed.seq.trained / timed.rate.step_s if timed.rate.step_s else 0.0,
        utilisation=min(max(peak, 0.0), 1.0),
        prior=prior_source(candidate),
    )


def _notes(needs: Requirements, timed: TimedCandidate, search: LrSearchPlan | None) -> Iterator[str]:
    """Say what the engine does with the profile's keys, and which facts are guesses."""
    case = EngineCase(needs.task.task_type, needs.task.image_type, needs.engine)
    for note in annotations_for(needs.profile, case):
        yield f"{note.path.removeprefix('targets.')}: {note.text}"
    names = (
        []
        if not needs.rank_factors
        else [name for one in linear_shapes(needs.model) for name in module_names(needs.model, one)]
    )
    for pattern, _ in needs.rank_factors:
        if not any(matches(pattern, name) for name in names):
            yield f"lora_rank_pattern: {pattern!r} matches no layer that is known of {needs.model.model_id}"
    if (reach := adapter_reach(needs, timed.candidate)) is not None:
        yield reach
    model = needs.model
    if needs.task.task_type.makes_rows and parser_for(model.model_id, model.architecture) is None:
        yield f"the evaluator reads no tool calls of {model.model_id}: every turn would be a forfeit"
    if needs.recipe is not None:
        yield "rank, rate and batch are the family's recipe, which engine_config.pictures changes"
    data = needs.data
    unasked = needs.task.task_type.is_supervised and needs.targets.sample_packing is None
    if unasked and needs.model.packing_problem:
        yield f"sample_packing: off, {needs.model.packing_problem}"
    if needs.model.is_image and data.rows_confidence.value == "guess":
        yield f"{data.rows} pictures are assumed: sections of the profile follow their number"
    if not needs.model.is_image and data.lengths_confidence.value == "guess":
        yield "token lengths are assumed, not measured"
    if needs.task.task_type.generates and (seen := timed.schedule.epochs) < ENOUGH_PROMPTS:
        yield (
            f"only {seen:.0%} of the {needs.training_rows:,} prompts are seen in the time; fewer completions "
            "for each (grpo_generations) show more of them"
        )
    if timed.seq.dropped_share > 0.005:
        yield f"{timed.seq.dropped_share:.1%} of the rows exceed {timed.seq.length} tokens and are dropped"
    if search is not None and search.first is not None:
        weights = f"weights of RMS {needs.conditions.weight_rms:.3g}"
        yield f"the search begins at {search.first:g} × the planned rate: {weights}"
    yield from needs.conditions.notes
    yield from needs.conditions.workarounds.notes
