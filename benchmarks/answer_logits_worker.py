"""Runs inside the training environment: passes with and without the logits that nothing is learned from.

training-python -m benchmarks.answer_logits_worker '{"models": {"7 B": 1400}, "prompts": [0.5], "passes": 9}'

Texts with transformers' trainer and ours, preferences with TRL's and ours, whose base is computed beforehand.
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
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer

from tests.trainer import tiny
from trainer.axolotl.answer_logits import skip_other_logits
from trainer.axolotl.patches import add_kl
from trainer.axolotl.trainers import PairTrainer
from trainer.inputs.tokens import IGNORED

#: Of a pass; half as many pairs.
ROWS, LENGTH = 8, 256
KL = 0.3
#: Of Axolotl: no other trainer and no fused loss.
PLAIN = SimpleNamespace(trainer_cls=None, liger_fused_linear_cross_entropy=None, cut_cross_entropy=None)
SHAPE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 4}


def main(asked: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for rows in ("texts", "texts, KL", "pairs"):
            for name, vocabulary in asked["models"].items():
                for prompt in asked["prompts"]:
                    found = compared(rows, vocabulary, prompt, asked["passes"], folder)
                    sys.stdout.write(json.dumps({"rows": rows, "model": name, **found}) + "\n")
                    sys.stdout.flush()


def compared(rows: str, vocabulary: int, prompt: float, passes: int, folder: str) -> dict[str, Any]:
    batch: Any
    if rows == "pairs":
        table = pairs_of(vocabulary, prompt)
        kinds = {"all": TrlPairTrainer, "answers": PairTrainer}
        trainers = {side: pair_trainer(kind, vocabulary, table, folder) for side, kind in kinds.items()}
        batch = next(iter(trainers["all"].get_train_dataloader()))
    else:
        trainers = {side: text_trainer(vocabulary, folder) for side in ("all", "answers")}
        with_kl = rows == "texts, KL"
        answers = skip_other_logits(trainers["answers"], PLAIN)
        assert answers is not None
        if with_kl:
            for trainer, cut in ((trainers["all"], None), (trainers["answers"], answers)):
                add_kl(trainer, KL, model_of(vocabulary, seed=1).eval(), lambda labels: 1.0, cut)
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


class TrlPairTrainer(DPOTrainer):  # type: ignore[misc]
    """TRL's own loss, with rows that are encoded."""

    _prepare_dataset = PairTrainer._prepare_dataset


def model_of(vocabulary: int, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SHAPE, vocab_size=vocabulary, tie_word_embeddings=False))


def text_trainer(vocabulary: int, folder: str) -> Any:
    trainer = Trainer(model_of(vocabulary), TrainingArguments(folder, use_cpu=True, report_to=[]))
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer


def pair_trainer(kind: Any, vocabulary: int, rows: Dataset, folder: str) -> Any:
    options = DPOConfig(
        folder,
        use_cpu=True,
        bf16=False,
        report_to=[],
        gradient_checkpointing=False,
        per_device_train_batch_size=ROWS // 2,
        precompute_ref_log_probs=True,
    )
    trainer = kind(
        model=model_of(vocabulary),
        ref_model=model_of(vocabulary, seed=1),
        args=options,
        train_dataset=rows,
        processing_class=tiny.tokenizer(),
    )
    trainer.model.train()
    return trainer


def batch_of(vocabulary: int, prompt: float) -> dict[str, Any]:
    chance = random.Random(0)
    torch.manual_seed(0)
    ids = torch.randint(0, vocabulary, (ROWS, LENGTH))
    labels = ids.clone()
    for row in labels:
        row[: prompt_length(prompt, chance)] = IGNORED
    return {"input_ids": ids, "labels": labels}


def pairs_of(vocabulary: int, prompt: float) -> Dataset:
    chance, rows = random.Random(0), []
    for _ in range(ROWS // 2):
        first, *sides = [[chance.randrange(vocabulary) for _ in range(LENGTH)] for _ in range(3)]
        begin = prompt_length(prompt, chance)
        rows.append(
            {"prompt_ids": first[:begin], "chosen_ids": sides[0][begin:], "rejected_ids": sides[1][begin:]}
        )
    return Dataset.from_list(rows)


def prompt_length(part: float, chance: random.Random) -> int:
    return round(LENGTH * part * chance.uniform(0.7, 1.3))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
