"""The training itself: steps, and between them whatever the session orders."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from core.plan import TrainingPlan
from core.progress import CheckpointEvent, StepEvent
from core.run_files import RunEnd
from trainer.callbacks.ema import MovingAverage
from trainer.callbacks.meter import Meter
from trainer.callbacks.search import Prober
from trainer.callbacks.session import STOP_GRACE_S, Judge, Session
from trainer.native import optimizing, ranks, saving
from trainer.native.batches import Batch, Layout, Loader, collate
from trainer.native.order import Micro, Order
from trainer.native.ranks import Ranks
from trainer.native.saving import Place
from trainer.native.tokens import TokenFile
from trainer.sheet import Outcome


@dataclass(frozen=True)
class Rows:
    """What is trained on, or held out."""

    tokens: TokenFile
    layout: Layout
    #: Pairs: the base model's preference, in the order of the pairs.
    reference: Tensor | None = None


@dataclass(frozen=True)
class Step:
    """What one optimizer step was."""

    loss: float
    norm: float
    rate: float
    #: Of all ranks.
    tokens: int


class HeldOutLoss(Judge):
    """The validators' loss on the held-out rows: each row, or pair, counts the same."""

    metric = "eval_loss"
    lower_is_better = True

    def __init__(self, net: nn.Module, rows: Rows, ranks: Ranks, micro: int) -> None:
        self._net, self._rows, self._ranks, self._micro = net, rows, ranks, micro
        self._share = 1.0
        self.pass_s = 0.0

    def begin(self, budget_s: float, untouched: bool) -> float:
        """A few rows tell what one costs, and so how many can be afforded each time."""
        self._share = self._least()
        began = time.monotonic()
        value = self.judge()
        self.pass_s = time.monotonic() - began
        per_share = self.pass_s / self._share
        affordable = self._ranks.from_first([budget_s / max(per_share, 1e-9)])[0]
        if affordable > self._share and self._share < 1:
            self._share = min(affordable, 1.0)
            began = time.monotonic()
            value = self.judge()
            self.pass_s = time.monotonic() - began
        return value

    def judge(self) -> float:
        return evaluate(self._net, self._rows, self._ranks, self._micro, self._share)

    def _least(self) -> float:
        return min(8 * self._ranks.world * self._micro / max(len(self._rows.tokens), 1), 1.0)


class Hands:
    """What the session needs of this engine."""

    def __init__(
        self, net: nn.Module, ranks: Ranks, judge: Judge | None, average: MovingAverage | None
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
    net: nn.Module
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
        # Sharding replaces the parameters, so the optimizer comes after it.
        self.spread = ranks.spread(self.net, self.plan, self.ranks)
        self.masters = optimizing.build(self.net, self.plan, self.ranks.device)
        if self.plan.ema is not None:
            trained = {name: weight for name, weight in self.net.named_parameters() if weight.requires_grad}
            self.hands.average = MovingAverage(trained, self.plan.ema.decay, self.plan.ema.every)
        self.meter = Meter(self.plan)
        self._saver = saving.Saver(self.folder, self.ranks, self.plan.steps.keep_checkpoints)
        self._weights = [weight for weight in self.net.parameters() if weight.requires_grad]

    def resume(self, folder: Path) -> None:
        self.place = saving.load(
            folder, self.net, self.masters, self.ranks, self.shape, average=self.hands.average
        )
        self.session.restore(self.place.session)

    def run(self) -> Outcome:
        """Until the last step or a reason to stop; the best is handed in by then."""
        with ExitStack() as stack:
            alive = stack.enter_context(ranks.watched())
            self.session.begin()
            self.begun()
            loader = Loader(
                self.train.tokens,
                self.order,
                self.train.layout,
                rank=self.ranks.rank,
                done=self.place.step,
                pin=self.plan.loader.pin_memory and self.ranks.device.type == "cuda",
                reference=self.train.reference,
                ahead=max(self.plan.loader.prefetch_factor or 2, 2),
            )
            stack.callback(loader.close)
            self.meter.read()
            began = time.monotonic()
            for batches in loader:
                alive()
                step = self._step(batches)
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

    def _step(self, batches: list[Batch]) -> Step:
        """One optimizer step over all ranks."""
        device, rate = self.ranks.device, self.plan.optimizer.learning_rate * self.session.rate
        count, tokens = self.ranks.total(
            sum(batch.count for batch in batches), sum(batch.tokens for batch in batches)
        )
        # DDP and FSDP take the mean over ranks of what is a sum here.
        scale = self.ranks.world / max(count, 1.0)
        summed = torch.zeros((), device=device)
        for number, batch in enumerate(batches, start=1):
            with ranks.no_sync(self.spread, last=number == len(batches)):
                loss = self.spread(batch.to(device))
                (loss * scale).backward()
                summed += loss.detach()
        norm = self._clipped()
        if math.isfinite(norm):
            self.masters.set_rate(rate)
            self.masters.step()
        self.masters.zero_grad()
        self.session.moved()
        (whole,) = self.ranks.total(float(summed))
        return Step(whole / max(count, 1.0), norm, rate, int(tokens))

    def _clipped(self) -> float:
        most = self.plan.optimizer.max_grad_norm or math.inf
        return float(ranks.whole(torch.nn.utils.clip_grad_norm_(self._weights, most, foreach=True)))

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
        self._saver.save(self.net, self.masters, self.place, self._saved, average=self.hands.average)
        self.session.clock.saved(time.monotonic() - began)

    def _saved(self, folder: Path) -> None:
        """From the writing thread: the state can be relied on from now on."""
        self.session.report.say(CheckpointEvent(t=time.time(), step=saving.step_of(folder), path=str(folder)))


@torch.no_grad()
def evaluate(net: nn.Module, rows: Rows, ranks: Ranks, micro: int, share: float = 1.0) -> float:
    """The mean loss of rows or pairs, each rank's part added up; of an even sample of them if `share` is less
    than all."""
    summed, count = 0.0, 0.0
    with _evaluating(net):
        for _, batch in _batches(rows, ranks, micro, share):
            loss = float(net(batch.to(ranks.device)))
            summed, count = summed + loss * bool(batch.count), count + batch.count
    summed, count = ranks.total(summed, count)
    return summed / max(count, 1.0)


@torch.no_grad()
def preferences(net: nn.Module, rows: Rows, ranks: Ranks, micro: int) -> Tensor:
    """How much the model prefers what was chosen, pair by pair, as it is now."""
    found = torch.zeros(len(rows.tokens) // 2, dtype=torch.float64)
    with _evaluating(net):
        for pairs, batch in _batches(rows, ranks, micro):
            values = net.preferred(batch.to(ranks.device)).double().cpu()  # type: ignore[operator]
            found[list(pairs)] = values * bool(batch.count)
    if ranks.world > 1:
        everywhere = found.to(ranks.device)
        torch.distributed.all_reduce(everywhere)
        found = everywhere.cpu()
    return found.float()


@contextmanager
def _evaluating(net: nn.Module) -> Iterator[None]:
    was_training = net.training
    net.eval()
    try:
        yield
    finally:
        net.train(was_training)


def _batches(
    rows: Rows, ranks: Ranks, micro: int, share: float = 1.0
) -> Iterator[tuple[tuple[int, ...], Batch]]:
    """This rank's part, long ones first, so that memory tells early. A sharded model is computed by all ranks
    together, so each has as many batches as the others: one that has fewer computes its first again, for
    nothing."""
    lengths = rows.tokens.lengths
    if rows.layout.pairs:
        lengths = lengths.reshape(-1, 2).max(axis=1)
    taken = max(round(len(lengths) * share), 1)
    sample = (np.arange(taken) * len(lengths)) // taken
    longest_first = sample[(-lengths[sample]).argsort(kind="stable")].tolist()
    mine = longest_first[ranks.rank :: ranks.world]
    most = -(-len(longest_first) // ranks.world)
    layout = replace(rows.layout, packed=False, length=None)
    for start in range(0, most, micro):
        some = tuple(mine[start : start + micro])
        single: Micro = tuple((row,) for row in some or longest_first[:1])
        batch = collate(rows.tokens, single, layout, rows.reference)
        yield some, batch if some else replace(batch, count=0.0)


def _finite(value: float) -> float | None:
    """Events hold no NaN; a missing number says it as well."""
    return value if math.isfinite(value) else None


def _memory(device: torch.device) -> int | None:
    return int(torch.cuda.max_memory_reserved(device)) if device.type == "cuda" else None
