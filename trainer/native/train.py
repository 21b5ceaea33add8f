"""Train: one process of the native engine, from the launch spec to the outcome. Read it from top to bottom.

1. `main` reads the launch spec and the plan, guards this process, and joins the process group.
2. `train` sets up data, model, session and optimizer, resumes, and runs the loop.
3. `run_loop` makes one optimizer step after the other until the session stops, and finishes.

Below these are the helpers, in the order in which they are first used. A call marked `all ranks` is
collective: left out on one rank, the others wait for ever.

`accelerate launch … -m trainer.native`, or torchrun, or alone. The launch spec's path is in the environment.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from core.planning.plan import TrainingPlan
from core.recipes.native import settings_of
from core.runs.progress import CheckpointEvent
from core.runs.run_files import RunEnd
from trainer.handoff import LaunchSpec, TrainingFailure, TrainingOutcome, write_record
from trainer.inputs.corpus import open_rows
from trainer.inputs.model_loading import block_imports
from trainer.native import checkpoints, speed
from trainer.native.batches import BatchLayout, MicroBatch, SampleOrder, TokenBatch, TokenRows
from trainer.native.checkpoints import BadCheckpoint, Saver, TrainingPosition
from trainer.native.distributed import NativeCommunicator, join_process_group, shard, shard_mesh
from trainer.native.evaluation import HeldOutLoss, with_base_preferences
from trainer.native.loader import BatchLoader
from trainer.native.model import (
    DpoLossModel,
    KlLossModel,
    LoadedModel,
    LossModel,
    frozen_base,
    load_model,
    without_adapters,
)
from trainer.native.optimizer import Stepper
from trainer.session.clock import STOP_GRACE_S
from trainer.session.control import MicroChange, release_memory
from trainer.session.ema import MovingAverage, drop_gathered
from trainer.session.failures import exit_with_failure, record_uncaught
from trainer.session.learning_rate import Prober
from trainer.session.progress_log import ProgressLog, SpeedMeter, with_tensorboard
from trainer.session.session import Scorer, Session, session_of
from trainer.session.undo import Snapshots, StepUndo
from trainer.session.watchdog import (
    HangWatchdog,
    dump_stacks_on_request,
    exit_with_runner,
    stop_on_term,
)

#: Nothing that is planned takes as long as this many times its own forecast.
_HANG_FACTOR = 10.0
#: Compiling with autotuning takes a quarter of an hour; the runner's own patience ends after twenty minutes.
_COMPILING_S = 1100.0


def main() -> None:
    block_imports("sklearn")  # transformers' generation would take a second and more to import it
    spec, rank = LaunchSpec.read(), int(os.environ.get("RANK", "0"))
    plan = spec.plan
    progress = ProgressLog(Path(spec.run.progress_path) if rank == 0 else None)
    if rank == 0 and settings_of(plan).tensorboard:
        progress = with_tensorboard(progress, Path(spec.run.work_dir) / "tensorboard")
    sessions: list[Session] = []

    def phase() -> str:
        return sessions[0].phase if sessions else "load"

    def on_hang(reason: str) -> None:
        detail = f"rank {rank} stands still: {reason}"
        failure = TrainingFailure(end=RunEnd.HUNG, moment=phase(), detail=detail, at=time.time())
        exit_with_failure(spec, rank, failure)

    record_uncaught(spec, rank, phase)
    dump_stacks_on_request()
    exit_with_runner(spec.wrapper_pid)
    if spec.wrapper_pid is None:
        stop_on_term(Path(spec.run.stop_path))
    if rank == 0:
        spec.marker_path.touch()
    with ExitStack() as stack:
        limit = hang_seconds(plan)
        watchdog = stack.enter_context(HangWatchdog(limit, on_hang))
        group = join_process_group(cpu=plan.gpus.is_cpu, heartbeat=watchdog.heartbeat, hang_s=limit)
        ranks = stack.enter_context(group)
        outcome = train(spec, plan, progress, ranks, on_session=sessions.append)
        if ranks.rank == 0:
            write_record(spec.outcome_path, outcome)
        ranks.barrier()  # all ranks


def train(
    spec: LaunchSpec,
    plan: TrainingPlan,
    progress: ProgressLog,
    ranks: NativeCommunicator,
    on_session: Callable[[Session], None],
) -> TrainingOutcome:
    """`on_session` is called as soon as there is one: what fails before is a failure to load."""
    # Data and model
    planned_micro = plan.batch.micro
    setup = set_up(spec, plan, progress, ranks)  # all ranks
    plan, net = setup.plan, setup.net

    # Optimizer
    work = Path(spec.run.work_dir)
    stepper = Stepper(net, plan, ranks)  # all ranks

    # Session
    scorer = HeldOutLoss(net, setup.held_out, ranks, plan.batch.eval_micro) if setup.held_out else None
    prober = prober_of(setup, stepper, ranks, work / "snapshots")
    host = NativeHost(net, ranks, scorer, prober, moving_average(net, plan))
    session = session_of(spec, plan, progress, ranks, host)
    session.controls.begin(planned_micro)
    on_session(session)
    saver = Saver(work / "output", ranks, plan.steps.keep_checkpoints)
    trainer = Trainer(setup, ranks, session, host, stepper, saver, TrainingPosition(0, setup.shape))

    # Resume
    if spec.resume_from and not resume(trainer, Path(spec.resume_from)):  # all ranks
        progress.note("resume", "no checkpoint could be resumed from: the training starts again from step 0")

    # Loop
    on_first_step = spec.started_path.touch if ranks.rank == 0 else lambda: None
    return run_loop(trainer, on_first_step)


@dataclass
class TrainingSetup:
    """The objects of a training: model, rows and their order."""

    #: With the batch that was found to fit.
    plan: TrainingPlan
    net: LossModel
    train: TokenRows
    held_out: TokenRows | None
    order: SampleOrder
    #: Of the numbers that decide what a step is: a run resumes only from checkpoints of the same shape.
    shape: str


@dataclass
class Trainer:
    """The state of one process's training."""

    setup: TrainingSetup
    ranks: NativeCommunicator
    session: Session
    host: NativeHost
    stepper: Stepper
    saver: Saver
    #: The next step.
    position: TrainingPosition


def run_loop(trainer: Trainer, on_first_step: Callable[[], None] = lambda: None) -> TrainingOutcome:
    """Until the last step or a reason to stop; the best model has been submitted by then."""
    setup, ranks, session, host = trainer.setup, trainer.ranks, trainer.session, trainer.host
    loading, meter = setup.plan.loader, SpeedMeter(setup.plan)
    session.begin()  # all ranks: score the untouched model, search for a rate
    on_first_step()
    loader = BatchLoader(
        setup.train,
        setup.order,
        rank=ranks.rank,
        done=trainer.position.step,
        pin=loading.pin_memory and ranks.device.type == "cuda",
        ahead=max(loading.prefetch_factor or 2, 2),
    )
    host.loader = loader
    with ExitStack() as stack:
        stack.callback(loader.close)
        meter.read()
        began = time.monotonic()
        for batches in loader:
            # Step. The schedule goes by progress from 0 to 1: how many steps there will be is a forecast.
            step = trainer.stepper.step(batches, session.rate, smaller_batches(trainer))  # all ranks
            session.optimizer_stepped()
            ranks.heartbeat()
            trainer.position = replace(trainer.position, step=trainer.position.step + 1)
            if host.average is not None:
                host.average.stepped(trainer.position.step)

            # Count and log
            meter.tokens += sum(batch.tokens for batch in batches)
            meter.samples += sum(batch.samples for batch in batches)
            meter.waited, loader.waited_s = meter.waited + loader.waited_s, 0.0
            session.logged(step.loss, step.norm)
            if trainer.position.step % setup.plan.steps.log_every == 0:
                memory = torch.cuda.max_memory_reserved(ranks.device) if ranks.device.type == "cuda" else None
                session.log_step(
                    trainer.position.step,
                    meter.read(),
                    memory,
                    epoch=trainer.position.step / setup.order.steps_per_epoch,
                    loss=step.loss,
                    lr=step.rate,
                    grad_norm=step.norm,
                )

            # Evaluate, submit, save, or stop, as the session orders. None of it counts as a step's time.
            stepped = time.monotonic()
            orders = session.stepped(stepped - began)  # all ranks
            if orders.save and session.stop is None:
                save(trainer)  # all ranks
            began = time.monotonic()
            meter.paused += began - stepped
            if session.stop is not None:
                break

    # Finish: the last evaluation and submission; a last checkpoint if there is time after a request to stop
    outcome = session.finish()  # all ranks
    clock = session.clock
    has_time = float(clock.save_s <= min(STOP_GRACE_S, clock.left))
    if outcome.end is RunEnd.STOPPED and ranks.from_first([has_time])[0]:  # all ranks
        save(trainer)  # all ranks
    trainer.saver.wait()
    return outcome


def hang_seconds(plan: TrainingPlan) -> float:
    longest = max(plan.time.step_s, plan.time["evaluate"], plan.time["save"])
    compiling = _COMPILING_S if plan.precision.compile_mode else 0.0
    return max(settings_of(plan).hang_seconds, _HANG_FACTOR * longest, compiling)


def set_up(
    spec: LaunchSpec, plan: TrainingPlan, progress: ProgressLog, ranks: NativeCommunicator
) -> TrainingSetup:
    """Load model and rows. The order matters to the last bit: each step may draw random numbers or change the
    plan for those after it."""
    work = Path(spec.run.work_dir) / "native"
    torch.manual_seed(plan.targets.seed)
    speed.allow_tf32(plan)
    progress.stage("load", "the model")
    mesh = shard_mesh(plan, ranks)  # all ranks
    loaded = load_model(Path(spec.run.model_path), plan, ranks.device, mesh)  # all ranks
    ranks.heartbeat()
    vocabulary = int(without_adapters(loaded.model).config.vocab_size)
    train, held_out = load_rows(spec, plan, ranks, vocabulary, "train"), None  # all ranks
    if spec.prepared.eval_path is not None:
        held_out = load_rows(spec, plan, ranks, vocabulary, "eval")  # all ranks
    net = build_objective(spec, plan, loaded, train.layout.pairs, ranks.device, mesh)
    speed.convert_to_fp8(net, plan, progress.note)
    shard(net, plan, mesh, ranks.device)  # all ranks
    # A sharded model's passes wait for all ranks, also for one that has just run out of memory.
    if ranks.device.type == "cuda" and settings_of(plan).probe_batch and mesh is None:
        plan = speed.larger_micro(plan, speed.probe_batch(net, plan, train.layout, ranks))  # all ranks
    if isinstance(net, DpoLossModel):
        progress.stage("load", "what the base model prefers")
        micro, resumed = plan.batch.eval_micro, spec.resume_from is not None
        train = with_base_preferences(net, train, ranks, micro, work, resumed=resumed)  # all ranks
        held_out = held_out and with_base_preferences(net, held_out, ranks, micro, work, resumed=resumed)
    speed.compile_layers(net, plan, progress.note)
    order = sample_order(train, plan, ranks.world)
    shape = f"{spec.prepared.digest[:12]} {plan.batch.effective} {plan.sequence.length} {order.ramp}"
    return TrainingSetup(plan, net, train, held_out, order, shape)


def load_rows(
    spec: LaunchSpec, plan: TrainingPlan, ranks: NativeCommunicator, vocabulary: int, which: str
) -> TokenRows:
    table = spec.prepared.train_path if which == "train" else spec.prepared.eval_path
    assert table is not None
    folder = Path(spec.run.work_dir) / "native" / which
    tokens, pairs = open_rows(table, folder, vocabulary, plan, ranks)
    ranks.require_same(f"rows ({which})", *tokens.fingerprint())
    packed = which == "train" and plan.sequence.packing and not pairs
    fixed = which == "train" and (packed or plan.sequence.pad_to_length)
    layout = BatchLayout(
        length=plan.sequence.length if fixed else None,
        packed=packed,
        by_row=not pairs and settings_of(plan).objective == "rows",
        pairs=pairs,
    )
    return TokenRows(tokens, layout)


def build_objective(
    spec: LaunchSpec,
    plan: TrainingPlan,
    loaded: LoadedModel,
    pairs: bool,
    device: torch.device,
    mesh: DeviceMesh | None,
) -> LossModel:
    """The model with the loss that the task is scored by."""
    if pairs:
        return DpoLossModel(*loaded, plan.targets.dpo_beta)
    if not spec.run.kl_coefficient:
        return LossModel(*loaded)
    path = Path(spec.run.model_path)
    base = frozen_base(path, plan, device, mesh) if plan.adapter is None else None
    return KlLossModel(*loaded, spec.run.kl_coefficient, base)


def sample_order(train: TokenRows, plan: TrainingPlan, world: int) -> SampleOrder:
    batch, sequence = plan.batch, plan.sequence
    return SampleOrder(
        train.lengths,
        sequence.length,
        batch.micro,
        batch.accumulation,
        world,
        seed=plan.targets.seed,
        packing=train.layout.packed,
        group_by_length=sequence.group_by_length,
        ramp=settings_of(plan).ramp_steps(plan.steps.total),
    )


class NativeHost:
    """This engine, as the session needs it."""

    def __init__(
        self,
        net: LossModel,
        ranks: NativeCommunicator,
        scorer: Scorer | None,
        prober: Prober | None = None,
        average: MovingAverage | None = None,
    ) -> None:
        self._net, self._ranks = net, ranks
        self.scorer, self.prober, self.average = scorer, prober, average
        #: As long as steps are made.
        self.loader: BatchLoader | None = None

    def write(self, folder: Path | None) -> None:
        checkpoints.export_model(self._net, folder, self._ranks)

    def averaged(self) -> AbstractContextManager[None]:
        return self.average.applied() if self.average is not None else nullcontext()

    def regroup(self, micro: int | None) -> MicroChange:
        assert self.loader is not None
        release_memory()
        return self.loader.regroup(micro)


def smaller_batches(trainer: Trainer) -> Callable[[], list[TokenBatch] | None]:
    """Return a function that makes the step's smaller batches after a grown micro-batch ran out of memory.
    Several processes cannot go back: the others wait for the one that ran out, and the run ends as out of
    memory."""

    def smaller() -> list[TokenBatch] | None:
        loader = trainer.host.loader
        undone = loader.undo_growth() if loader is not None and trainer.ranks.world == 1 else None
        if undone is None:
            return None
        micro, batches = undone
        text = f"memory ran out: back to {micro} sequences in a pass"
        trainer.session.controls.undo_growth(micro, trainer.session.step, text)
        return batches

    return smaller


def trained_parameters(net: LossModel) -> dict[str, torch.nn.Parameter]:
    """After `Stepper`: sharding replaces the parameters."""
    return {name: weight for name, weight in net.named_parameters() if weight.requires_grad}


def moving_average(net: LossModel, plan: TrainingPlan) -> MovingAverage | None:
    if plan.ema is None:
        return None
    drop = partial(drop_gathered, net)
    return MovingAverage(trained_parameters(net), plan.ema.decay, plan.ema.every, drop)


def prober_of(
    setup: TrainingSetup, stepper: Stepper, ranks: NativeCommunicator, folder: Path
) -> NativeProber:
    """Prepare to try learning rates out; `folder` is for weights that memory has no room for meanwhile."""
    launch, drop = setup.plan.launch, partial(drop_gathered, setup.net)
    per_machine = launch.processes // launch.machines
    states = Snapshots(trained_parameters(setup.net), folder, ranks, per_machine, drop)
    return NativeProber(stepper, setup.train, setup.order, ranks, states)


def resume(trainer: Trainer, folder: Path) -> Path | None:
    """Resume from this checkpoint, or from the newest older one that is complete and of this run; return
    which. A checkpoint that is neither costs its steps, never the run."""
    session, host = trainer.session, trainer.host
    for candidate in checkpoints.checkpoints_up_to(folder):
        try:
            trainer.position = checkpoints.load_checkpoint(
                candidate, trainer.stepper, trainer.ranks, trainer.setup.shape, host.average
            )
        except BadCheckpoint as error:
            session.progress.note("resume", f"not from {candidate.name}: {error}")
            continue
        session.restore(trainer.position.session)
        return candidate
    return None


def save(trainer: Trainer) -> None:
    """Copy what a checkpoint holds; a thread writes it."""
    session = trainer.session

    def on_written(folder: Path) -> None:
        """In the writing thread: from now on the checkpoint is complete."""
        step = checkpoints.step_of(folder)
        session.progress.write(CheckpointEvent(t=time.time(), step=step, path=str(folder)))

    began = time.monotonic()
    trainer.position = replace(trainer.position, session=session.state())
    trainer.saver.save(trainer.stepper, trainer.position, on_written, trainer.host.average)
    session.clock.saved(time.monotonic() - began)


class NativeProber:
    """Makes the steps that the training would begin with. The order of rows is a function of the step, and
    the loader is made later, so neither has anything to undo."""

    def __init__(
        self,
        stepper: Stepper,
        rows: TokenRows,
        order: SampleOrder,
        ranks: NativeCommunicator,
        states: Snapshots,
    ) -> None:
        self._stepper, self._rows, self._order, self._ranks = stepper, rows, order, ranks
        self._states = states
        self._before: StepUndo | None = None
        self._coming: Iterator[list[MicroBatch]] = iter(())
        self._steps: list[list[MicroBatch]] = []

    def begin(self) -> bool:
        self._before = StepUndo.of(self._states, self._stepper.masters.parts)
        self._coming = self._order.for_rank(self._ranks.rank)
        return self._before is not None

    def step(self, factor: float, place: int) -> float:
        while place >= len(self._steps):
            self._steps.append(next(self._coming))
        loss = self._stepper.step(self._rows.batches(self._steps[place]), factor).loss
        self._ranks.heartbeat()
        return loss

    def restore(self) -> None:
        assert self._before is not None
        self._before.restore()
        self._stepper.masters.restart()

    def end(self) -> None:
        assert self._before is not None
        self._before.end()
        self._before, self._coming, self._steps = None, iter(()), []
