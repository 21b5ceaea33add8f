"""GRPO by the winner's rules: TRL's own trainer, with its schedule and its choice of a checkpoint.

No search and no soup: the winner has neither for rewards. It samples with vLLM, which needs a GPU; here
our sampler takes its place, so that completions cost both sides the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.text_rules import winner_rules as rules
from benchmarks.text_rules.peer import load_model
from benchmarks.text_rules.peer_loop import CpuClock, State, common_arguments, trained_state
from core.domain.choices import Method
from core.domain.tasks import GrpoDataset
from core.runs.run_files import RunSpec
from trainer.inputs.text import read_task
from trainer.inputs.tokens import PromptRow, load_tokenizer
from trainer.rewards.sandbox import Rewards
from trainer.rewards.source import REWARD_TABLE, write_rewards
from trainer.scoring.completions import complete
from trainer.scoring.held_out import HeldOut
from trainer.scoring.sampling import SamplingRules

#: Prompts of an evaluation at most: each is answered twice.
MOST_PROMPTS = 64
#: Evaluations that are hoped for; the clock allows fewer.
EVALUATIONS = 10


class GrpoCallback(TrainerCallback):  # type: ignore[misc]
    """The clock, the schedule's length, and the best model so far."""

    def __init__(self, ask: dict[str, Any], model: Any, held: HeldOut, base: Any, per_epoch: int) -> None:
        self._ask, self._model, self._held, self._base = ask, model, held, base
        self._most = self.total = round(rules.GRPO_EPOCHS * per_epoch)
        self.steps, self._spent, self._eval_s, self._scored = 0, 0.0, 0.0, 0
        self.best: tuple[float, State] | None = None
        self.scores: list[float] = []

    def factor(self, step: int) -> float:
        return rules.rate_factor(step, self.total, rules.warmup(self.total, self._ask["hours"]))

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.clock = CpuClock(self._ask["seconds"])
        self._held.remember_base(self._model)
        self._eval_s = self._spent = self.clock.used

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self.steps = state.global_step
        step_s = (self.clock.used - self._spent) / self.steps
        if self.steps in (2, 5):
            fits = 1.25 * 0.85 * (self.clock.seconds - self._spent) / step_s
            self.total = max(min(self._most, round(fits)), self.steps + 1)
        end_s = self._eval_s + step_s + rules.END_SHARE * self.clock.seconds
        over = self.steps >= self.total or self.clock.left < end_s
        due = self.steps - self._scored >= max(self.total // EVALUATIONS, 1)
        if over or (due and self._spent + self._eval_s <= rules.EVALUATION_SHARE * self.clock.seconds):
            self._evaluate()
        control.should_training_stop = over
        return control

    def _evaluate(self) -> None:
        began, self._scored = self.clock.used, self.steps
        score = float(self._held.score(self._model, reference=self._base).value)
        self.scores.append(round(score, 4))
        if self.best is None or score > self.best[0]:
            self.best = score, trained_state(self._model)
        self._eval_s = self.clock.used - began
        self._spent += self._eval_s


class SampledTrainer(GRPOTrainer):  # type: ignore[misc]
    """TRL's trainer with our sampler."""

    def _generate_single_turn(self, prompt_ids: list[list[int]], images: Any, multimodal_fields: Any) -> Any:
        tokenizer = self.processing_class
        sampling = SamplingRules(
            self.temperature,
            0,
            self.max_completion_length,
            (tokenizer.eos_token_id,),
            tokenizer.pad_token_id or 0,
        )
        prompts, seed = prompt_ids[:: rules.GENERATIONS], int(torch.randint(1 << 62, (1,)))
        model = self.accelerator.unwrap_model(self.model_wrapped)
        return complete(model, prompts, rules.GENERATIONS, sampling, seed), None


def train(ask: dict[str, Any], spec: RunSpec) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(ask["seed"])
    tokenizer, method = load_tokenizer(spec.model_path), Method(ask["method"])
    prompts = [row for row in read_task(spec, tokenizer).rows if isinstance(row, PromptRow)]
    count = rules.dev_rows(len(prompts))
    dev, rows = prompts[:count], prompts[count:]
    folder = Path(spec.work_dir) / "rewards"
    assert isinstance(spec.dataset, GrpoDataset)
    write_rewards(spec.dataset, folder, era=spec.era)
    rewards = Rewards.open(folder / REWARD_TABLE)
    line = rules.class_of(spec.task_type, method)
    batch = rules.rows_of_step(spec.task_type, method) // ask["batch_divisor"]
    batch -= batch % rules.GENERATIONS
    per_epoch = math.ceil(len(rows) * rules.GENERATIONS / batch)
    model = load_model(ask, spec)
    base = load_model(ask, spec).eval() if method is Method.FULL else None
    held = HeldOut(spec, dev, tokenizer, rewards, max_prompts=MOST_PROMPTS, together=MOST_PROMPTS)
    callback, rate = GrpoCallback(ask, model, held, base, per_epoch), line.rate * ask["rate_factor"]
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate, weight_decay=0.0)
    arguments = common_arguments(ask, spec, batch, rate, callback.total)
    SampledTrainer(
        model=model,
        reward_funcs=[_function(rewards, place) for place in range(len(rewards))],
        # What the winner's TRL had as defaults is named where today's has others.
        args=GRPOConfig(
            **arguments,
            num_generations=rules.GENERATIONS,
            beta=rules.KL_WEIGHT,
            loss_type="bnpo",
            max_completion_length=256,
            temperature=1.0,
            reward_weights=rewards.weights,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_list([{"prompt": row.prompt} for row in rows]),
        processing_class=tokenizer,
        callbacks=[callback],
        optimizers=(optimizer, LambdaLR(optimizer, callback.factor)),
    ).train()
    assert callback.best is not None
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name in callback.best[1]:
                weight.copy_(callback.best[1][name])
    rewards.close()
    return model, {
        "steps": callback.steps,
        "epochs": round(callback.steps / per_epoch, 2),
        "rate": rate,
        "batch": batch,
        "cpu_s": round(callback.clock.used, 2),
        "notes": [f"of {callback.total} steps; scores {callback.scores}"],
    }


def _function(rewards: Rewards, place: int) -> Callable[..., list[float]]:
    def reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
        return rewards.call(place, completions, prompts=prompts)

    reward.__name__ = f"reward_{place}"
    return reward
