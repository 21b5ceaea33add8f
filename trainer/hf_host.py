"""The session's hands in a Hugging Face trainer: whichever of Axolotl's trainers it is, all are one
underneath."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from core.progress import StepEvent
from core.run_files import RunEnd
from trainer.callbacks.ema import MovingAverage
from trainer.callbacks.meter import Meter
from trainer.callbacks.search import Prober
from trainer.callbacks.session import STOP_GRACE_S, Judge, Session
from trainer.generating import generate_well, wake
from trainer.hf_probe import HfProber
from trainer.sheet import Outcome, Sheet, write_whole

#: Beside the engine's own files in a checkpoint folder: what the session must know to go on.
STATE_FILE, AVERAGE_FILE = "god_miner.json", "god_miner_average.safetensors"


class HfHost:
    """Model and weights."""

    def __init__(self, trainer: Any, judge: Judge | None, average: MovingAverage | None) -> None:
        self.trainer, self.judge, self.average = trainer, judge, average
        self.prober: Prober | None = HfProber(trainer)

    @property
    def model(self) -> Any:
        """Without the wrappers of data parallelism and compilation."""
        return self.trainer.accelerator.unwrap_model(self.trainer.model, keep_torch_compile=False)

    def write(self, folder: Path | None) -> None:
        state = None
        if self.trainer.is_fsdp_enabled:
            state = self.trainer.accelerator.get_state_dict(self.trainer.model)
        if folder is None:
            return
        model = self.model
        if getattr(model, "peft_config", None):
            # Preference training may carry a second adapter as its reference: it is none of the result.
            chosen = ["default"] if "default" in model.peft_config else None
            model.save_pretrained(folder, state_dict=state, selected_adapters=chosen)
        else:
            model.save_pretrained(folder, state_dict=state)

    def set_rate(self, factor: float) -> None:
        """For the first step: the engine asks the schedule for a factor only after each."""
        for group in self.trainer.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor

    @contextmanager
    def averaged(self) -> Iterator[bool]:
        if self.average is None:
            yield False
            return
        with self.average.applied():
            yield True


class SessionCallback(TrainerCallback):  # type: ignore[misc]
    """Carries out what the session orders, and nothing that the engine would order by itself."""

    def __init__(self, sheet: Sheet, session: Session, host: HfHost, meter: Meter) -> None:
        self.sheet, self.session, self.host, self.meter = sheet, session, host, meter
        self.outcome: Outcome | None = None
        self._mark = time.monotonic()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        wake(self.host.trainer.model)
        self._before_generating()
        self.session.begin()
        self.host.set_rate(self.session.rate)
        if self.session.ranks.rank == 0:
            self.sheet.begun_path.touch()
        self._mark = time.monotonic()

    def _before_generating(self) -> None:
        """Only now is the model wrapped as it will be trained."""
        plan = self.session.plan
        if plan.grpo is not None:
            whole = plan.grpo.whole_layers / plan.model.layers
            reshard = plan.fsdp is None or plan.fsdp.reshard_after_forward
            generate_well(self.host.trainer.model, whole, reshard, self.session.generating)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Right before the engine asks the schedule for the next rate."""
        self.session.moved()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        began = time.monotonic()
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
        """The last evaluation and submission; whether there is time for a checkpoint after them."""
        self._end()
        clock = self.session.clock
        room = clock.save_s <= min(STOP_GRACE_S, clock.left)
        return bool(self.session.ranks.from_first([room])[0])

    def _end(self) -> None:
        if self.outcome is not None:
            return
        self.outcome = self.session.finish()
        if self.session.ranks.rank == 0:
            write_whole(self.sheet.outcome_path, self.outcome)

    def _remember(self, folder: Path) -> None:
        """Before the engine writes its own files: its `trainer_state.json` comes last and says it is
        whole."""
        if self.session.ranks.rank:
            return
        folder.mkdir(parents=True, exist_ok=True)
        state = self.session.state()
        if self.host.average is not None:
            from safetensors.torch import save_file

            save_file(self.host.average.state(), folder / AVERAGE_FILE)
            state["average_updates"] = self.host.average.updates
        (folder / STATE_FILE).write_text(json.dumps(state), encoding="utf-8")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        seconds = time.monotonic() - self._mark
        self.session.checkpointed(Path(args.output_dir) / f"checkpoint-{state.global_step}", seconds)
        self.meter.paused += seconds
        self._mark = time.monotonic()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        logs = logs or {}
        if "loss" not in logs:
            return
        loss, norm = _number(logs.get("loss")), _number(logs.get("grad_norm"))
        self.session.logged(loss, norm)
        reading = self.meter.read()
        clock = self.session.clock
        self.session.report.say(
            StepEvent(
                t=time.time(),
                step=state.global_step,
                total=clock.total,
                epoch=_finite(_number(state.epoch)),
                loss=_finite(loss),
                lr=_finite(_number(logs.get("learning_rate"))),
                grad_norm=_finite(norm),
                tokens_s=reading.tokens_s,
                mfu=reading.mfu,
                memory_bytes=_memory(),
                wait=reading.wait,
                ends_at=time.time() + (clock.total - clock.done) * clock.step_s + clock.finish_s,
            )
        )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """All that counts is on disk. The engine's own goodbye writes the whole model once more, and the
        process group's may wait for ever, so it is left out."""
        self._end()
        self.session.ranks.wait()
        leave()


def leave() -> None:
    import sys

    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def resume_state(folder: Path) -> dict[str, Any] | None:
    """What the session of an earlier process left in its checkpoint."""
    try:
        found = json.loads((folder / STATE_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _number(value: Any) -> float | None:
    if hasattr(value, "item"):
        value = value.item()
    return float(value) if isinstance(value, int | float) else None


def _finite(value: float | None) -> float | None:
    """Events hold no NaN: JSON has none. A missing number on a chart says it as well."""
    import math

    return value if value is not None and math.isfinite(value) else None


def _memory() -> int | None:
    import torch

    return int(torch.cuda.max_memory_reserved()) if torch.cuda.is_available() else None
