"""The winner's training loop: transformers' trainer with its clock, schedule and evaluations."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.text_rules import winner_rules as rules

if TYPE_CHECKING:
    from benchmarks.text_rules.peer import Peer

State = dict[str, Any]


class CpuClock:
    """CPU seconds of this process: another one on the same core costs nothing."""

    def __init__(self, seconds: float) -> None:
        self._began, self.seconds = time.process_time(), seconds

    @property
    def used(self) -> float:
        return time.process_time() - self._began

    @property
    def left(self) -> float:
        return self.seconds - self.used


def trained_state(model: Any) -> State:
    return {
        name: weight.detach().clone() for name, weight in model.named_parameters() if weight.requires_grad
    }


class Batch:
    """Rows on their way through a loader, which looks into nothing that it does not know."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self.rows = rows


class PeerCallback(TrainerCallback):  # type: ignore[misc]
    """When to evaluate and to stop, and the best models so far."""

    def __init__(self, peer: Peer, clock: CpuClock, eval_s: float) -> None:
        self._peer, self._clock, self.eval_s = peer, clock, eval_s
        self._every = rules.evaluation_every(peer.task, peer.per_epoch)
        self._began = clock.used
        self._spent, self._scored = 0.0, -1
        self.steps, self.total = 0, max(round(1.3 * peer.per_epoch), 1)
        self.members: list[tuple[float, State]] = []

    def factor(self, step: int) -> float:
        return rules.rate_factor(step, self.total, rules.warmup(self.total, self._peer.ask["hours"]))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._began = self._clock.used

    @property
    def _step_s(self) -> float:
        return (self._clock.used - self._began - self._spent) / max(self.steps, 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self.steps = state.global_step
        if self.steps in (2, 10):
            left = self._clock.left + self._clock.used - self._began
            peer = self._peer
            passes = rules.epochs(left, self._step_s, peer.per_epoch, len(peer.rows))
            self.total = max(round(passes * peer.per_epoch), self.steps)
        over = self.steps >= self.total or self._clock.left < self._end_s()
        cost = self._spent + self.eval_s
        due = self.steps % self._every == 0 and self.steps >= rules.FIRST_EVALUATION * self._peer.per_epoch
        if over or (due and cost <= rules.EVALUATION_SHARE * self._clock.seconds):
            self._evaluate()
        control.should_training_stop = over
        return control

    def _end_s(self) -> float:
        """Time reserved for the last evaluation, the soup and the pass over the dev rows."""
        dev = len(self._peer.dev) / self._peer.batch
        return self._step_s * (dev + 1) + self.eval_s + rules.END_SHARE * self._clock.seconds

    def _evaluate(self) -> None:
        began = self._clock.used
        self.members.append((self._peer.score(), trained_state(self._peer.model)))
        self.members.sort(key=lambda member: member[0])
        del self.members[rules.SOUP_MEMBERS :]
        self.eval_s = self._clock.used - began
        self._spent += self.eval_s

    def told(self) -> str:
        scores = ", ".join(f"{score:.4f}" for score, _ in self.members)
        return f"{self.steps} of {self.total} steps, {1000 * self._step_s:.0f} ms each; best {scores}"


class PeerTrainer(Trainer):  # type: ignore[misc]
    """Rows as they are, and the winner's loss of them."""

    def __init__(self, peer: Peer, callback: PeerCallback, rate: float) -> None:
        self._peer = peer
        weights = [weight for weight in peer.model.parameters() if weight.requires_grad]
        optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0.0)
        most = round(4 * peer.per_epoch) + 1
        super().__init__(
            model=peer.model,
            args=TrainingArguments(**common_arguments(peer.ask, peer.spec, peer.batch, rate, most)),
            train_dataset=list(peer.rows),
            data_collator=lambda rows: {"rows": Batch(rows)},
            callbacks=[callback],
            optimizers=(optimizer, LambdaLR(optimizer, callback.factor)),
        )

    def compute_loss(self, model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        return self._peer.loss(model, inputs["rows"].rows)


def common_arguments(ask: dict[str, Any], spec: Any, batch: int, rate: float, steps: int) -> dict[str, Any]:
    return {
        "output_dir": str(Path(spec.work_dir) / "output"),
        "per_device_train_batch_size": batch,
        "learning_rate": rate,
        "max_steps": max(steps, 1),
        "max_grad_norm": rules.MAX_NORM,
        "seed": ask["seed"],
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "eval_strategy": "no",
        "logging_steps": 100,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "remove_unused_columns": False,
    }
