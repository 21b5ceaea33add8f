"""The training itself: steps, and between them whatever the session orders."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from core.plan import TrainingPlan
from core.progress import CheckpointEvent, StepEvent
from core.run_files import RunEnd
from trainer.callbacks.ema import MovingAverage
from trainer.callbacks.meter import Meter
from trainer.callbacks.search import Prober
from trainer.callbacks.session import STOP_GRACE_S, Judge, Session
from trainer.native import saving
from trainer.native.batches import Loader, Rows
from trainer.native.net import Net
from trainer.native.order import Order
from trainer.native.ranks import Ranks
from trainer.native.saving import BadCheckpoint, Place
from trainer.native.step import Step, Stepper
from trainer.sheet import Outcome


class Hands:
    """What the session needs of this engine."""

    def __init__(
        self, net: Net, ranks: Ranks, judge: Judge | None, average: MovingAverage | None = None
    ) -> None:
        self._net, self._ranks = net, ranks
        self.judge, self.average = judge, average
        self.prober: Prober | None = None

    def write(self, folder: Path | None) -> None:
        saving.export(self._net, folder, self._ranks)

    def averaged(self) -> AbstractContextManager[bool]:
        return self._with_average() if self.average is not None else nullcontext(False)

    @contextmanager
    def _with_average(self) -> Iterator[bool]:
        assert self.average is not None
        with self.average.applied():
            yield True


@dataclass
class Loop:
    net: Net
    plan: TrainingPlan
    ranks: Ranks
    train: Rows
    order: Order
    session: Session
    hands: Hands
    #: Where states are saved.
    folder: Path
    #: Of the run's shape: a state goes on only in a run like its own.
    shape: str
    #: Told when the first step is about to be made.
    begun: Callable[[], None] = lambda: None
    place: Place = field(init=False)

    def __post_init__(self) -> None:
        self.place = Place(0, self.shape)
        self._stepper = Stepper(self.net, self.plan, self.ranks)
        if self.plan.ema is not None:
            trained = {name: weight for name, weight in self.net.named_parameters() if weight.requires_grad}
            self.hands.average = MovingAverage(trained, self.plan.ema.decay, self.plan.ema.every)
        self.meter = Meter(self.plan)
        self._saver = saving.Saver(self.folder, self.ranks, self.plan.steps.keep_checkpoints)

    def resume(self, folder: Path) -> Path | None:
        """Goes on from the state, or from the newest older one that is whole and of this run; says which. A
        state that is neither costs its steps, never the run."""
        for candidate in saving.upto(folder):
            try:
                self.place = saving.load(candidate, self._stepper, self.ranks, self.shape, self.hands.average)
            except BadCheckpoint as error:
                self.session.report.note("resume", f"not from {candidate.name}: {error}")
                continue
            self.session.restore(self.place.session)
            return candidate
        return None

    def run(self) -> Outcome:
        """Until the last step or a reason to stop; the best is handed in by then."""
        with ExitStack() as stack:
            self.session.begin()
            self.begun()
            loader = Loader(
                self.train,
                self.order,
                rank=self.ranks.rank,
                done=self.place.step,
                pin=self.plan.loader.pin_memory and self.ranks.device.type == "cuda",
                ahead=max(self.plan.loader.prefetch_factor or 2, 2),
            )
            stack.callback(loader.close)
            self.meter.read()
            began = time.monotonic()
            for batches in loader:
                step = self._stepper.step(batches, self.session.rate)
                self.session.moved()
                self.ranks.alive()
                self.place = replace(self.place, step=self.place.step + 1)
                if self.hands.average is not None:
                    self.hands.average.stepped(self.place.step)
                self.meter.tokens += sum(batch.tokens for batch in batches)
                self.meter.waited, loader.waited_s = self.meter.waited + loader.waited_s, 0.0
                self._log(step)
                began = self._between(time.monotonic() - began)
                if self.session.stop is not None:
                    break
        return self._finished()

    def _between(self, seconds: float) -> float:
        """Evaluations and saves, as ordered; when the next step begins."""
        began = time.monotonic()
        orders = self.session.stepped(seconds)
        if orders.save and self.session.stop is None:
            self._save()
        ended = time.monotonic()
        self.meter.paused += ended - began
        return ended

    def _finished(self) -> Outcome:
        outcome = self.session.finish()
        clock = self.session.clock
        room = float(clock.save_s <= min(STOP_GRACE_S, clock.left))
        if outcome.end is RunEnd.STOPPED and self.ranks.from_first([room])[0]:
            self._save()
        self._saver.wait()
        return outcome

    def _log(self, step: Step) -> None:
        self.session.logged(step.loss, step.norm)
        if self.place.step % self.plan.steps.log_every:
            return
        reading, clock = self.meter.read(), self.session.clock
        self.session.report.say(
            StepEvent(
                t=time.time(),
                step=self.place.step,
                total=clock.total,
                epoch=self.place.step / self.order.steps_per_epoch,
                loss=_finite(step.loss),
                lr=step.rate,
                grad_norm=_finite(step.norm),
                tokens_s=reading.tokens_s,
                mfu=reading.mfu,
                memory_bytes=_memory(self.ranks.device),
                wait=reading.wait,
                ends_at=time.time() + (clock.total - clock.done) * clock.step_s + clock.finish_s,
            )
        )

    def _save(self) -> None:
        began = time.monotonic()
        self.place = replace(self.place, session=self.session.state())
        self._saver.save(self._stepper, self.place, self._saved, self.hands.average)
        self.session.clock.saved(time.monotonic() - began)

    def _saved(self, folder: Path) -> None:
        """From the writing thread: the state can be relied on from now on."""
        self.session.report.say(CheckpointEvent(t=time.time(), step=saving.step_of(folder), path=str(folder)))


def _finite(value: float) -> float | None:
    """Events hold no NaN; a missing number says it as well."""
    return value if math.isfinite(value) else None


def _memory(device: torch.device) -> int | None:
    return int(torch.cuda.max_memory_reserved(device)) if device.type == "cuda" else None
