"""Runs inside the training environment: passes with and without the logits that nothing is learned from.

training-python -m benchmarks.answer_logits_worker '{"models": {"7 B": 1400}, "prompts": [0.5], "passes": 9}'
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from trainer.axolotl.answer_logits import skip_other_logits
from trainer.inputs.tokens import IGNORED

ROWS, LENGTH = 8, 256
#: Of Axolotl: no other trainer and no fused loss.
PLAIN = SimpleNamespace(trainer_cls=None, liger_fused_linear_cross_entropy=None, cut_cross_entropy=None)
SHAPE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}


def main(asked: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, vocabulary in asked["models"].items():
            for prompt in asked["prompts"]:
                print(json.dumps({"model": name, **compared(vocabulary, prompt, asked["passes"], folder)}))
                sys.stdout.flush()


def compared(vocabulary: int, prompt: float, passes: int, folder: str) -> dict[str, Any]:
    trainers = {side: trainer_of(vocabulary, folder) for side in ("all", "answers")}
    assert skip_other_logits(trainers["answers"], PLAIN)
    batch = batch_of(vocabulary, prompt)
    seconds: dict[str, list[float]] = {side: [] for side in trainers}
    losses = dict.fromkeys(trainers, 0.0)
    for turn in range(passes + 1):
        for side, trainer in trainers.items():
            began = time.process_time()
            loss = trainer.compute_loss(trainer.model, dict(batch))
            loss.backward()
            trainer.model.zero_grad()
            losses[side] = float(loss)
            if turn:  # the first one warms up
                seconds[side].append(time.process_time() - began)
    model = trainers["all"].model
    output = model.get_output_embeddings().weight.numel()
    # Input embeddings, of the same size, are looked up and cost next to nothing.
    share = output / (sum(weight.numel() for weight in model.parameters()) - output)
    return {"prompt": prompt, "share": share, "gap": abs(losses["all"] - losses["answers"]), **seconds}


def trainer_of(vocabulary: int, folder: str) -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, vocab_size=vocabulary, tie_word_embeddings=False))
    trainer = Trainer(model, TrainingArguments(folder, use_cpu=True, report_to=[]))
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def batch_of(vocabulary: int, prompt: float) -> dict[str, Any]:
    chance = random.Random(0)
    torch.manual_seed(0)
    ids = torch.randint(0, vocabulary, (ROWS, LENGTH))
    labels = ids.clone()
    for row in labels:
        row[: round(LENGTH * prompt * chance.uniform(0.7, 1.3))] = IGNORED
    return {"input_ids": ids, "labels": labels}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
