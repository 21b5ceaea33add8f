"""Connect the session to a Hugging Face trainer; all of Axolotl's trainers are one underneath."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from core.runs.run_files import RunEnd
from trainer.axolotl.micro_batches import MicroBatchSplitter
from trainer.axolotl.patches import patch_generate, run_first_pass
from trainer.handoff import LaunchSpec, TrainingOutcome, write_record
from trainer.session.clock import STOP_GRACE_S
from trainer.session.control import MicroChange, release_memory, wait_for_gpu
from trainer.session.ema import MovingAverage, drop_gathered
from trainer.session.learning_rate import Prober
from trainer.session.progress_log import SpeedMeter
from trainer.session.session import Scorer, Session
from trainer.session.undo import Snapshots, StepUndo

#: Beside the engine's own files in a checkpoint folder: what the session needs to resume.
STATE_FILE, AVERAGE_FILE = "god_miner.json", "god_miner_average.safetensors"


class HfHost:
    """The engine's model and weights, as the session needs them."""

    def __init__(self, trainer: Any, scorer: Scorer | None, splitter: MicroBatchSplitter) -> None:
        self.trainer, self.scorer, self._splitter = trainer, scorer, splitter
        self.average: MovingAverage | None = None
        self.prober: Prober | None = None

    @property
    def model(self) -> Any:
        """The model without the wrappers of data parallelism and compilation."""
        return self.trainer.accelerator.unwrap_model(self.trainer.model, keep_torch_compile=False)

    def write(self, folder: Path | None) -> None:
        state = None
        if self.trainer.is_fsdp_enabled:
            state = self.trainer.accelerator.get_state_dict(self.trainer.model)
        if folder is None:
            return
        model = self.model
        # Preference training may carry a second adapter as its reference: not part of the result.
        chosen = {"selected_adapters": ["default"]} if "default" in getattr(model, "peft_config", ()) else {}
        model.save_pretrained(folder, state_dict=state, **chosen)

    def set_rate(self, factor: float) -> None:
        """Set the rate of the first step: the engine calls the schedule only after each step."""
        for group in self.trainer.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor

    def averaged(self) -> AbstractContextManager[None]:
        return self.average.applied() if self.average is not None else nullcontext()

    def regroup(self, micro: int | None) -> MicroChange:
        release_memory()
        return self._splitter.regroup(micro)


class SessionCallback(TrainerCallback):  # type: ignore[misc]
    """Does what the session orders, and nothing that the engine would decide by itself."""

    def __init__(self, spec: LaunchSpec, session: Session, host: HfHost, meter: SpeedMeter) -> None:
        self.spec, self.session, self.host, self.meter = spec, session, host, meter
        self.outcome: TrainingOutcome | None = None
        self._mark = time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._begin_snapshots()
        self._begin_average()
        run_first_pass(self.host.trainer.model)
        self._patch_generation()
        self.session.begin()
        self.host.set_rate(self.session.rate)
        if self.session.ranks.rank == 0:
            self.spec.started_path.touch()
        self._mark = time.monotonic()

    def _trained(self) -> dict[str, Any]:
        """Only now the weights are those that will be trained: sharding replaces them."""
        model = self.host.trainer.model
        drop_gathered(model)
        return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}

    def _begin_snapshots(self) -> None:
        host, launch = self.host, self.session.plan.launch
        drop = partial(drop_gathered, host.trainer.model)
        folder, per_machine = Path(self.spec.run.work_dir) / "snapshots", launch.processes // launch.machines
        states = Snapshots(self._trained(), folder, self.session.ranks, per_machine, drop)
        host.prober = HfProber(host.trainer, states)

    def _begin_average(self) -> None:
        plan, model = self.session.plan.ema, self.host.trainer.model
        if plan is None:
            return
        average = MovingAverage(self._trained(), plan.decay, plan.every, partial(drop_gathered, model))
        self.host.average = average
        if self.spec.resume_from is None:
            return
        folder = Path(self.spec.resume_from)
        state, file = resume_state(folder), folder / self._average_file
        if state is not None and file.is_file():
            from safetensors.torch import load_file

            average.restore(load_file(file), int(state.get("average_updates", 0)))

    @property
    def _average_file(self) -> str:
        """Sharded, every rank has an average of its own."""
        sharded = self.session.plan.fsdp is not None
        return f"{AVERAGE_FILE}.rank{self.session.ranks.rank}" if sharded else AVERAGE_FILE

    def _patch_generation(self) -> None:
        """Called here because only now the model is wrapped as it will be trained."""
        plan = self.session.plan
        if plan.grpo is not None:
            gathered_share = plan.grpo.whole_layers / plan.model.layers
            reshard = plan.fsdp is None or plan.targets.fsdp_reshard_after_forward
            patch_generate(self.host.trainer.model, gathered_share, reshard, self.session.generating)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called right before the engine calls the schedule for the next rate."""
        self.session.optimizer_stepped()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        if self.session.clock.duty < 1:
            wait_for_gpu()
        began = time.monotonic()
        self.meter.samples += self.meter.plan.batch.effective // self.meter.plan.batch.world_size
        if self.host.average is not None:
            self.host.average.stepped(state.global_step)
        orders = self.session.stepped(began - self._mark)
        control.should_evaluate = False
        control.should_save = orders.save
        if self.session.stop is not None:
            control.should_training_stop = True
            control.should_save = self._finished() and self.session.stop.end is RunEnd.STOPPED
        if control.should_save:
            self._remember(Path(args.output_dir) / f"checkpoint-{state.global_step}")
        self._mark = time.monotonic()
        self.meter.paused += self._mark - began
        return control

    def _finished(self) -> bool:
        """Finish the session; return whether there is time for a checkpoint afterwards."""
        self._end()
        clock = self.session.clock
        has_time = clock.save_s <= min(STOP_GRACE_S, clock.left)
        return bool(self.session.ranks.from_first([has_time])[0])

    def _end(self) -> None:
        if self.outcome is not None:
            return
        self.outcome = self.session.finish()
        if self.session.ranks.rank == 0:
            write_record(self.spec.outcome_path, self.outcome)

    def _remember(self, folder: Path) -> None:
        """Called before the engine writes its own files: its `trainer_state.json` comes last and marks the
        checkpoint as complete."""
        average, state = self.host.average, self.session.state()
        first, sharded = self.session.ranks.rank == 0, self.session.plan.fsdp is not None
        if not first and (average is None or not sharded):
            return
        folder.mkdir(parents=True, exist_ok=True)
        if average is not None:
            from safetensors.torch import save_file

            save_file(average.state(), folder / self._average_file)
            state["average_updates"] = average.updates
        if first:
            (folder / STATE_FILE).write_text(json.dumps(state), encoding="utf-8")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        seconds = time.monotonic() - self._mark
        self.session.checkpointed(Path(args.output_dir) / f"checkpoint-{state.global_step}", seconds)
        self.meter.paused += seconds
        self._mark = time.monotonic()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        import torch

        logs = logs or {}
        if "loss" not in logs:
            return
        loss, norm = _number(logs.get("loss")), _number(logs.get("grad_norm"))
        self.session.logged(loss, norm)
        self.session.log_step(
            state.global_step,
            self.meter.read(),
            int(torch.cuda.max_memory_reserved()) if torch.cuda.is_available() else None,
            epoch=_number(state.epoch),
            loss=loss,
            lr=_number(logs.get("learning_rate")),
            grad_norm=norm,
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """All that counts is on disk. The engine would write the whole model once more, and leaving the
        process group may wait for ever, so both are skipped."""
        self._end()
        self.session.ranks.barrier()
        leave_training()


def leave_training() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def resume_state(folder: Path) -> dict[str, Any] | None:
    """Read the session's state from a checkpoint of an earlier process, or return None if there is none."""
    try:
        state = json.loads((folder / STATE_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) else None


def _number(value: Any) -> float | None:
    if hasattr(value, "item"):
        value = value.item()
    return float(value) if isinstance(value, int | float) else None


def step_of_engine(trainer: Any, samples: Sequence[Any], count: Any) -> float:
    """An optimizer step on these micro-batches, as the engine makes them; its loss. None of its counters
    moves."""
    model, total = trainer.model_wrapped, 0.0
    trainer.current_gradient_accumulation_steps = len(samples)
    for at, inputs in enumerate(samples):
        last = at + 1 == len(samples)
        trainer.accelerator.gradient_state._set_sync_gradients(last)
        with nullcontext() if last else trainer.accelerator.no_sync(model):
            # Some trainers take out of the batch what they have used.
            own_inputs = dict(inputs) if isinstance(inputs, Mapping) else list(inputs)
            total += float(trainer.training_step(model, own_inputs, count))
    if trainer.args.max_grad_norm > 0:
        trainer._clip_grad_norm(model)
    trainer.optimizer.step()
    model.zero_grad()
    return total


class HfProber:
    """Training steps that are undone, made between `on_train_begin` and the first step.

    The engine's own methods do the work (its `training_step` accumulates, shards and generates as later), but
    none of its counters moves.
    """

    def __init__(self, trainer: Any, states: Snapshots) -> None:
        self._trainer, self._states = trainer, states
        self._loader: Any = None
        self._rows: Iterator[Any] = iter(())
        self._batches: list[tuple[list[Any], Any]] = []
        self._before: StepUndo | None = None
        self._orders: list[tuple[Any, Any]] = []

    def begin(self) -> bool:
        self._before = StepUndo.of(self._states, [self._trainer.optimizer])
        if self._before is None:
            return False
        # The training's own: another one would have to be packed, which takes as long as a search.
        self._loader = self._trainer.callback_handler.train_dataloader
        # Its order may come from a generator of its own, which goes on where the probes left it.
        self._orders = [(item, item.get_state()) for item in _generators(self._loader)]
        self._rows = iter(self._loader)
        return True

    @property
    def _model(self) -> Any:
        return self._trainer.model_wrapped

    def step(self, factor: float, place: int) -> float:
        assert self._before is not None
        samples, count = self._batch(place)
        for group, kept in zip(self._trainer.optimizer.param_groups, self._before.groups, strict=True):
            group["lr"] = kept["initial_lr"] * factor
        return step_of_engine(self._trainer, samples, count)

    def _batch(self, place: int) -> tuple[list[Any], Any]:
        """The batch of this place, the same every time; after the last row the first batch again."""
        trainer = self._trainer
        while place >= len(self._batches):
            wanted = trainer.args.gradient_accumulation_steps
            samples, count = trainer.get_batch_samples(self._rows, wanted, trainer.args.device)
            if len(samples) < wanted:
                break
            self._batches.append((samples, count))
        if not self._batches:
            raise ValueError("there are not rows enough for one step")
        return self._batches[place % len(self._batches)]

    def restore(self) -> None:
        assert self._before is not None
        self._before.restore()
        self._forget()

    def _forget(self) -> None:
        """Clear what TRL's trainers collect: metrics, and for rewards the completions of several steps."""
        if hasattr(self._trainer, "_buffered_inputs"):
            self._trainer._step, self._trainer._buffered_inputs = 0, None
        for metrics in getattr(self._trainer, "_metrics", {}).values():
            metrics.clear()
        getattr(self._trainer, "pair_means", []).clear()

    def end(self) -> None:
        assert self._before is not None
        self._before.end()
        self._model.zero_grad()
        for generator, state in self._orders:
            generator.set_state(state)
        # A prepared loader stays "the active one" until its last row has been read.
        if hasattr(self._loader, "end"):
            self._loader.end()
        self._loader, self._rows = None, iter(())
        self._before, self._batches, self._orders = None, [], []


def _generators(loader: Any, deep: int = 4) -> list[Any]:
    """The random generators of a loader and of its samplers, however they are wrapped."""
    import torch

    generators = []
    for name in ("generator", "sampler", "batch_sampler", "base_dataloader"):
        part = getattr(loader, name, None)
        if isinstance(part, torch.Generator):
            generators.append(part)
        elif part is not None and deep:
            generators += _generators(part, deep - 1)
    return [
        generator
        for number, generator in enumerate(generators)
        if all(generator is not other for other in generators[:number])
    ]
