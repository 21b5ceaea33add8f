"""The training itself: steps, evaluations, saves, and the reasons to stop."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from core.plan import TrainingPlan
from core.run_files import RunEnd
from trainer.native import optimizing, ranks, saving
from trainer.native.batches import Batch, Layout, Loader, collate
from trainer.native.order import Micro, Order
from trainer.native.ranks import Ranks
from trainer.native.saving import Place
from trainer.native.schedules import factor
from trainer.native.tokens import TokenFile

#: Steps whose time is looked at to tell how many more there will be.
_TIMED_STEPS = 20
#: Norms beyond this are not clipped but left out: one such batch would fill Adam's moments for long.
_SKIPPED_NORM = 1e4


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

    number: int
    total: int
    loss: float
    rate: float
    norm: float
    tokens: int
    seconds: float
    #: Of `seconds`, waiting for data.
    waited_s: float


class Coach(Protocol):
    """What the clock, the submission and the operator want of a run; the same for every engine."""

    def total_steps(self, planned: int, done: int, step_s: float) -> int:
        """How many steps there will be in all, given what one takes."""

    def stepped(self, step: Step) -> None: ...

    def rate_factor(self) -> float:
        """A factor on the learning rate, beside its schedule."""

    def wants_evaluation(self, done: int, total: int) -> bool: ...

    def evaluated(self, loss: float, done: int, seconds: float) -> bool:
        """Whether this is the best so far, to be handed in."""

    def submit(self, net: nn.Module, done: int) -> None:
        """Every rank calls this."""

    def saved(self, folder: Path, done: int) -> None: ...

    def verdict(self) -> RunEnd | None:
        """A reason to stop now."""


@dataclass
class Loop:
    net: nn.Module
    plan: TrainingPlan
    ranks: Ranks
    train: Rows
    held_out: Rows | None
    order: Order
    coach: Coach
    folder: Path
    #: Of the run's shape: a state goes on only in a run like its own.
    shape: str
    place: Place = field(init=False)

    def __post_init__(self) -> None:
        self.place = Place(0, 0, self.shape)
        # Sharding replaces the parameters, so the optimizer comes after it.
        self.spread = ranks.spread(self.net, self.plan, self.ranks)
        self.masters = optimizing.build(self.net, self.plan, self.ranks.device)
        self._saver = saving.Saver(self.folder, self.ranks, self.plan.steps.keep_checkpoints)
        self._weights = [weight for weight in self.net.parameters() if weight.requires_grad]

    def resume(self, folder: Path) -> None:
        self.place = saving.load(folder, self.net, self.masters, self.ranks, self.shape)

    def run(self) -> RunEnd:
        """Until the last step or a reason to stop. Whatever is the best so far has been handed in then."""
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
        with ExitStack() as stack:
            stack.callback(self._saver.wait)
            stack.callback(loader.close)
            alive = stack.enter_context(ranks.watched())
            return self._steps(loader, alive)

    def _steps(self, loader: Loader, alive: Callable[[], None]) -> RunEnd:
        planned = self.plan.steps.total
        times: deque[float] = deque(maxlen=_TIMED_STEPS)
        total, done = planned, self.place.step
        for batches in loader:
            if done >= total:
                break
            waited, began = loader.waited_s, time.perf_counter()
            alive()
            loss, norm, tokens = self._step(batches, self._rate(done, total))
            done += 1
            seconds = time.perf_counter() - began
            times.append(seconds)
            self.place = replace(
                self.place, step=done, tokens=self.place.tokens + tokens, seconds=self.place.seconds + seconds
            )
            if not math.isfinite(loss):
                return RunEnd.NAN
            rate = self._rate(done - 1, total)
            self.coach.stepped(Step(done, total, loss, rate, norm, tokens, seconds, loader.waited_s - waited))
            # Every rank must come to the same number, so the slowest one's time counts.
            slowest = self.ranks.most(statistics.median(times))
            total = int(-self.ranks.most(-self.coach.total_steps(planned, done, slowest)))
            if self._pause(done, total):
                break
        return self._ended(done, total)

    def _pause(self, done: int, total: int) -> bool:
        """Evaluate and save where it is time to; whether to stop."""
        last = done >= total
        stop = self.ranks.any(self.coach.verdict() is not None)
        if last or stop or self.ranks.any(self.coach.wants_evaluation(done, total)):
            self._evaluate(done)
        if not last and done % self.plan.steps.save_every == 0:
            self._save(done)
        return last or stop or self.ranks.any(self.coach.verdict() is not None)

    def _ended(self, done: int, total: int) -> RunEnd:
        verdict = self.coach.verdict()
        if verdict is not None:
            return verdict
        return RunEnd.FINISHED if done >= self.plan.steps.total else RunEnd.CLOCK

    def _step(self, batches: list[Batch], rate: float) -> tuple[float, float, int]:
        """The mean loss, the gradient's norm and the tokens of one optimizer step over all ranks."""
        device = self.ranks.device
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
        if math.isfinite(norm) and norm < _SKIPPED_NORM:
            self.masters.set_rate(rate)
            self.masters.step()
        self.masters.zero_grad()
        (whole,) = self.ranks.total(float(summed))
        return whole / max(count, 1.0), norm, int(tokens)

    def _clipped(self) -> float:
        most = self.plan.optimizer.max_grad_norm or math.inf
        return float(ranks.whole(torch.nn.utils.clip_grad_norm_(self._weights, most, foreach=True)))

    def _rate(self, done: int, total: int) -> float:
        plan = self.plan.optimizer
        share = min(plan.warmup_steps / max(total, 1), 0.5)
        # The middle of the step: the first one learns something, the last one too.
        at = (done + 0.5) / max(total, 1)
        return plan.learning_rate * factor(plan, at, share) * self.coach.rate_factor()

    def _evaluate(self, done: int) -> None:
        if self.held_out is None:
            self.coach.submit(self.net, done)
            return
        began = time.perf_counter()
        loss = self.evaluate()
        if self.coach.evaluated(loss, done, time.perf_counter() - began):
            self.place = replace(self.place, best=loss)
            self.coach.submit(self.net, done)

    def evaluate(self) -> float:
        """The held-out loss as validators count it."""
        assert self.held_out is not None
        return evaluate(self.net, self.held_out, self.ranks, self.plan.batch.eval_micro)

    def _save(self, done: int) -> None:
        self._saver.save(self.net, self.masters, self.place, lambda folder: self.coach.saved(folder, done))


@torch.no_grad()
def evaluate(net: nn.Module, rows: Rows, ranks: Ranks, micro: int) -> float:
    """The mean loss of rows or pairs, each rank's part added up."""
    summed, count = 0.0, 0.0
    with _evaluating(net):
        for _, batch in _batches(rows, ranks, micro):
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


def _batches(rows: Rows, ranks: Ranks, micro: int) -> Iterator[tuple[tuple[int, ...], Batch]]:
    """This rank's part, long ones first, so that memory tells early. A sharded model is computed by all ranks
    together, so each has as many batches as the others: one that has fewer computes its first again, for
    nothing."""
    lengths = rows.tokens.lengths
    if rows.layout.pairs:
        lengths = lengths.reshape(-1, 2).max(axis=1)
    longest_first = (-lengths).argsort(kind="stable").tolist()
    mine = longest_first[ranks.rank :: ranks.world]
    most = -(-len(longest_first) // ranks.world)
    layout = replace(rows.layout, packed=False, length=None)
    for start in range(0, most, micro):
        some = tuple(mine[start : start + micro])
        single: Micro = tuple((row,) for row in some or longest_first[:1])
        batch = collate(rows.tokens, single, layout, rows.reference)
        yield some, batch if some else replace(batch, count=0.0)
