"""Runs inside the training environment, for `grpo_step.py`: steps with TRL's trainer and ours."""

from __future__ import annotations

import json
import math
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from axolotl.core.trainers.grpo.args import AxolotlGRPOConfig
from axolotl.core.trainers.grpo.trainer import AxolotlGRPOTrainer
from datasets import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PrinterCallback, TrainerCallback

from core.domain.tasks import GrpoDataset, RewardFunction
from core.recipes.axolotl.recipe import BASE_ONLY
from tests.trainer import tiny
from trainer.axolotl.prompt_kl import add_prompt_kl
from trainer.axolotl.trainers import RawPromptTrainer
from trainer.rewards.sandbox import Rewards
from trainer.rewards.source import REWARD_MODULE, REWARD_TABLE, write_rewards

TEMPERATURE, TOP_K, LONGEST = 0.9, 50, 256
#: A completion ends at a token with a chance of one in so many.
MEAN_LENGTH = 75
PROMPTS = 400
#: TRL's KL on completions, and that on prompts which `steady` has in its place.
BETA, PROMPT_KL = 0.04, 0.5


class TrlTrainer(AxolotlGRPOTrainer):  # type: ignore[misc]
    """TRL's own steps, with the prompts encoded as ours are."""

    def _tokenize_prompts(self, prompts: list[Any]) -> Any:
        return self.processing_class(text=prompts, add_special_tokens=False)["input_ids"], None, {}


def prompts(seed: int) -> list[dict[str, str]]:
    chance, rows = random.Random(seed), list[dict[str, str]]()
    while len(rows) < PROMPTS:
        words = int(chance.lognormvariate(4.0, 0.8))
        if 5 <= words <= 200:
            rows.append({"prompt": tiny.sentence(chance, words)})
    return rows


def saved_model(folder: Path, layers: int, hidden: int) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tiny.tokenizer()),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=4,
        eos_token_id=3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def loaded(folder: Path, adapter: bool) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder)
    _end_now_and_then(model)
    if adapter:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
    return model


def _end_now_and_then(model: Any) -> None:
    """Give the end token the same logit everywhere, so that completions are of all lengths."""
    torch.manual_seed(1)
    end, head = 3, model.lm_head
    with torch.no_grad():
        logits = model(input_ids=torch.randint(5, head.out_features, (8, 64))).logits
        likely = logits.topk(TOP_K, dim=-1).values / TEMPERATURE
        ending = TEMPERATURE * (float(likely.logsumexp(dim=-1).mean()) - math.log(MEAN_LENGTH))
        biased = torch.nn.Linear(head.in_features, head.out_features)
        biased.weight = head.weight
        biased.weight[end] = 0
        biased.bias.zero_()
        biased.bias[end] = ending
    biased.bias.requires_grad_(False)
    model.lm_head = biased


class Stopwatch(TrainerCallback):  # type: ignore[misc]
    """CPU and real seconds of all steps but the first."""

    def __init__(self) -> None:
        self.cpu = self.wall = self.generation = 0.0
        self._began = (0.0, 0.0)
        self.counts = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.counts = state.global_step > 0
        self._began = time.process_time(), time.monotonic()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if self.counts:
            self.cpu += time.process_time() - self._began[0]
            self.wall += time.monotonic() - self._began[1]

    def around(self, trainer: Any) -> None:
        plain = trainer._generate_single_turn

        def timed(*arguments: Any) -> Any:
            began = time.process_time()
            found = plain(*arguments)
            self.generation += (time.process_time() - began) * self.counts
            return found

        trainer._generate_single_turn = timed


def measured(
    kind: Any, model: Any, rewards: list[Any], case: dict[str, Any], asked: dict[str, Any], prompt_kl: bool
) -> Any:
    watch = Stopwatch()
    beta = BETA
    if prompt_kl:
        beta = 0.0 if case["adapter"] else BASE_ONLY
    with tempfile.TemporaryDirectory() as folder:
        options = AxolotlGRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=asked["pass"],
            gradient_accumulation_steps=asked["completions"] // asked["pass"],
            num_generations=case["generations"],
            max_completion_length=LONGEST,
            temperature=TEMPERATURE,
            top_k=TOP_K,
            beta=beta,
            max_steps=case["steps"] + 1,
            learning_rate=1e-6,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            logging_steps=1000,
            save_strategy="no",
            disable_tqdm=True,
            seed=1,
        )
        trainer = kind(
            model=model,
            reward_funcs=rewards,
            args=options,
            train_dataset=Dataset.from_list(prompts(2)),
            processing_class=tiny.tokenizer(),
            callbacks=[watch],
        )
        trainer.remove_callback(PrinterCallback)  # its lines are no results
        watch.around(trainer)
        if prompt_kl:
            add_prompt_kl(trainer, PROMPT_KL)
        trainer.train()
    return {"step": watch.cpu, "generation": watch.generation, "wall": watch.wall}


def words(prompts: Any, completions: list[str], **columns: Any) -> list[float]:
    return [float(len(text.split())) for text in completions]


def slow_rewards(seconds: float, folder: Path) -> list[Any]:
    """Two functions in processes of their own, as a task's are."""
    source = f"import time\ndef f(completions):\n    time.sleep({seconds} * len(completions))\n"
    source += "    return [float(len(one)) for one in completions]"
    functions = [RewardFunction(reward_func=source, reward_weight=1.0)] * 2
    dataset = GrpoDataset(field_prompt="prompt", reward_functions=functions)
    table = Rewards.open(write_rewards(dataset, folder) / REWARD_TABLE)

    def first(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        return table.call(0, completions)

    def second(prompts: Any, completions: Any, **columns: Any) -> list[float]:
        return table.call(1, completions)

    for function in (first, second):
        function.__module__ = REWARD_MODULE  # else they are an operator's own
    return [first, second]


def main(asked: dict[str, Any]) -> None:
    for case in asked["cases"]:
        with tempfile.TemporaryDirectory() as name:
            folder = saved_model(Path(name) / "model", case["layers"], case["hidden"])
            rewards = slow_rewards(case["slow"], Path(name) / "rewards") if case["slow"] else [words]
            found = {**case, "prompts": case["steps"] * asked["completions"] / case["generations"]}
            for side, kind in (("trl", TrlTrainer), ("ours", RawPromptTrainer), ("steady", RawPromptTrainer)):
                model = loaded(folder, case["adapter"])
                found[side] = measured(kind, model, rewards, case, asked, side == "steady")
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(json.loads(sys.argv[1]))
