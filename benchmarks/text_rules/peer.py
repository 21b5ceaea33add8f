"""Trains by the winner's rules (`winner_rules.py`): the peer of `trainer.text` in `text_rules.py`.

    training-python -m benchmarks.text_rules.peer ASK.json

On the stack that the winner used, transformers' and TRL's trainers: beside its arithmetic a step costs as
much as in ours. Rows are encoded as the evaluation reads them. Where the winner's own files do not say how
something is done, it is done as helps it: dev scores are the validator's metric, logits exist only where
something is learned, a step is one pass whatever its rows, references of preferences are computed before the
clock begins, and nothing is written before the end.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.text_rules import winner_rules as rules
from benchmarks.text_rules.minhash import groups_of
from benchmarks.text_rules.peer_loop import CpuClock, PeerCallback, PeerTrainer, State, trained_state
from benchmarks.text_rules.peer_losses import Answers, Loss, Preferences, add_noise
from benchmarks.text_rules.peer_search import RateSearch
from core.domain.choices import Method
from core.runs.run_files import RunSpec
from trainer.inputs.text import read_task
from trainer.inputs.tokens import IGNORED, LabelledRow, PromptRow, Row, load_tokenizer
from trainer.scoring.held_out import HeldOut


class Peer:
    """One training of rows with labels or of pairs."""

    def __init__(self, ask: dict[str, Any], spec: RunSpec) -> None:
        self.ask, self.spec = ask, spec
        self.task, self.method = spec.task_type, Method(ask["method"])
        torch.manual_seed(ask["seed"])
        self.tokenizer = load_tokenizer(spec.model_path)
        self.rows, self.dev = self._split()
        self.model = load_model(ask, spec)
        self.base = (
            load_model(ask, spec).eval() if spec.kl_coefficient and self.method is Method.FULL else None
        )
        line = rules.class_of(self.task, self.method)
        self.table = line.rate * ask["rate_factor"]
        self.batch = rules.rows_of_step(self.task, self.method) // ask["batch_divisor"]
        self.per_epoch = math.ceil(len(self.rows) / self.batch)
        self.held = HeldOut(spec, self.dev, self.tokenizer)
        self.loss = self._loss()

    def _split(self) -> tuple[list[Any], list[Any]]:
        """Near-duplicates are on one side, and where there are many, only one of them is kept."""
        rows = list(read_task(self.spec, self.tokenizer).rows)
        decode: Any = self.tokenizer
        groups = groups_of([decode.decode(_ids(row), skip_special_tokens=True) for row in rows])
        if 1 - len(groups) / len(rows) > rules.DUPLICATES:
            groups = [group[:1] for group in groups]
        wanted = rules.dev_rows(sum(map(len, groups)))
        random.Random(f"split {self.ask['seed']}").shuffle(groups)
        train, dev = list[Any](), list[Any]()
        for group in groups:
            side = dev if len(dev) < wanted else train
            side.extend(rows[place] for place in group)
        return train, dev

    def _loss(self) -> Loss:
        pad = self.tokenizer.pad_token_id or 0
        if self.task.has_pairs:
            return Preferences(pad, self.model.eval(), [*self.rows, *self.dev])
        add_noise(self.model, rules.NEFTUNE)
        labelled = [row for row in self.rows if isinstance(row, LabelledRow)]
        answers = sum(sum(label != IGNORED for label in row.labels) for row in labelled)
        prompts = sum(len(row.ids) for row in labelled) - answers
        weight = rules.prompt_weight(prompts, answers)
        return Answers(pad, self.base, self.spec.kl_coefficient or 0.0, weight)

    def score(self) -> float:
        return float(self.held.score(self.model, reference=self.base).value)

    def run(self) -> dict[str, Any]:
        clock = CpuClock(self.ask["seconds"])
        self.held.remember_base(self.model)
        search = RateSearch(self, clock, eval_s=clock.used)
        rate, searched = search.run(), clock.used
        callback = PeerCallback(self, clock, eval_s=search.eval_s)
        trainer = PeerTrainer(self, callback, rate)
        trainer.train()
        told = {
            "steps": callback.steps,
            "epochs": round(callback.steps / self.per_epoch, 2),
            "rate": rate,
            "batch": self.batch,
            "searched_s": round(searched, 2),
            "trained_s": round(clock.used - searched, 2),
            "notes": [*search.notes, callback.told(), self._soup(callback, clock)],
        }
        self._dev_pass(rate, clock)
        return told | {"cpu_s": round(clock.used, 2)}

    def set(self, state: State) -> None:
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                if name in state:
                    weight.copy_(state[name])

    def _soup(self, callback: PeerCallback, clock: CpuClock) -> str:
        """Greedy: the next best joins if the mean of all is better by that."""
        (first, mixed), *others = callback.members
        best, count, until = first, 1, clock.used + rules.SOUP_SHARE * clock.left
        for _, state in others:
            if clock.used + callback.eval_s > until:
                break
            tried = {name: (mixed[name] * count + state[name]) / (count + 1) for name in mixed}
            self.set(tried)
            score = self.score()
            if score < best - rules.SOUP_GAIN:
                best, mixed, count = score, tried, count + 1
        self.set(mixed)
        return f"soup of {count} of {len(others) + 1}: {first:.4f} to {best:.4f}"

    def _dev_pass(self, rate: float, clock: CpuClock) -> None:
        """One epoch over the dev rows; what the clock cuts off is not taken."""
        before, steps = trained_state(self.model), Steps(self)
        order = random.Random("dev").sample(self.dev, len(self.dev))
        for start in range(0, len(order), self.batch):
            if clock.left <= 0:
                self.set(before)
                return
            steps.step(order[start : start + self.batch], rules.DEV_RATE * rate)


def _ids(row: Row) -> list[int]:
    assert not isinstance(row, PromptRow)
    return list(row.ids) if isinstance(row, LabelledRow) else [*row.prompt, *row.chosen]


class Steps:
    """Steps of plain AdamW outside of the trainer: for the search and the pass over the dev rows."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._weights = [weight for weight in peer.model.parameters() if weight.requires_grad]
        self._optimizer = torch.optim.AdamW(self._weights, weight_decay=0.0)

    def step(self, rows: Sequence[Any], rate: float) -> float:
        loss = self._peer.loss(self._peer.model.train(), rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._weights, rules.MAX_NORM)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        return float(loss.detach())


def load_model(ask: dict[str, Any], spec: RunSpec) -> Any:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(spec.model_path, local_files_only=True)
    if Method(ask["method"]) is Method.FULL:
        return model
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=ask["rank"],
        lora_alpha=rules.LORA_ALPHA if spec.task_type.is_supervised else rules.LORA_ALPHA_RL,
        lora_dropout=rules.LORA_DROPOUT,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, config)


def main(path: str) -> int:
    ask = json.loads(Path(path).read_text("utf-8"))
    spec = RunSpec.model_validate(ask["run"])
    if spec.task_type.generates:
        from benchmarks.text_rules.peer_grpo import train

        model, told = train(ask, spec)
    else:
        peer = Peer(ask, spec)
        told, model = peer.run(), peer.model
    model.save_pretrained(spec.submission_dir)
    Path(path).with_name("told.json").write_text(json.dumps(told), encoding="utf-8")
    return 0
