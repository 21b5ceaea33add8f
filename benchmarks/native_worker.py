"""Runs inside the training environment: one training of a little model, and what it took, as one JSON line.

    training-python benchmarks/native_worker.py native|hf|axolotl|loader FOLDER '{"steps": 60, "micro": 8, …}'

Model, rows, batch, optimizer, numbers and steps are the same for all; none evaluates or saves. FOLDER is
made by whoever comes first.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

VOCABULARY = 2048


def now() -> tuple[float, float]:
    """By the wall, and by this process's share of the CPU, which a busy machine does not change."""
    return time.perf_counter(), time.process_time()


def rows(count: int, longest: int, seed: int = 0) -> list[tuple[list[int], int]]:
    """Tokens, and how many of them are the prompt; lengths as skewed as real ones."""
    random = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        length = int(np.clip(random.lognormal(np.log(longest / 4), 0.6), 8, longest))
        start, step = int(random.integers(VOCABULARY)), int(random.integers(1, 4))
        made.append(([(start + step * at) % VOCABULARY for at in range(length)], length // 3))
    return made


def model(folder: Path, layers: int, width: int) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    path = folder / f"model-{layers}-{width}"
    if not path.exists():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=layers,
            num_attention_heads=max(width // 32, 1),
            num_key_value_heads=max(width // 64, 1),
            max_position_embeddings=2048,
        )
        LlamaForCausalLM(config).save_pretrained(path)
        _tokenizer().save_pretrained(path)
    return path


def _tokenizer() -> Any:
    """Axolotl wants one, although its rows are tokens already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"t{number}": number for number in range(VOCABULARY)}, "t1"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", unk_token="t1", eos_token="t2")


def native(folder: Path, path: Path, what: dict[str, Any]) -> dict[str, Any]:
    from trainer.inputs.token_file import write_rows
    from trainer.native import model as nets
    from trainer.native.batches import BatchLayout, SampleOrder, TokenRows
    from trainer.native.distributed import NativeCommunicator
    from trainer.native.loader import BatchLoader
    from trainer.native.optimizer import Stepper

    made = rows(what["rows"], what["longest"])
    marked = [(ids, [at >= prompt for at in range(len(ids))]) for ids, prompt in made]
    file = write_rows(folder / "rows", VOCABULARY, marked)
    plan = _plan(what["method"] == "full")
    torch.manual_seed(0)
    base, attention = nets.load_model(path, plan, torch.device("cpu"))
    stepper = Stepper(nets.LossModel(base, attention), plan, NativeCommunicator(0, 1, torch.device("cpu")))
    packing = bool(what.get("packing"))
    order = SampleOrder(
        file.lengths,
        what["longest"],
        what["micro"],
        1,
        1,
        seed=what.get("seed", 0),
        packing=packing,
        group_by_length=what["grouped"],
    )
    layout = BatchLayout(packed=packing, length=what["longest"] if packing else None)
    loader = BatchLoader(TokenRows(file, layout), order)
    stamps, tokens = [now()], []
    for batches in loader:
        tokens.append(stepper.step(batches).tokens)
        stamps.append(now())
        if len(tokens) == what["steps"]:
            break
    loader.close()
    waited = loader.waited_s / (stamps[-1][0] - stamps[0][0])
    return _measured(stamps, tokens) | {"waited": waited, "held_out": _held_out(base, what)}


def _plan(full: bool) -> Any:
    from core.domain.choices import LrSchedule, Optimizer
    from core.planning.plan import AdapterPlan, OptimizerPlan
    from tests.trainer.native import tiny

    return tiny.plan(
        full=full,
        adapter=None if full else AdapterPlan(rank=16, alpha=16, dropout=0.0, params=1),
        optimizer=OptimizerPlan(
            name=Optimizer.ADAMW_TORCH_FUSED, learning_rate=1e-3, schedule=LrSchedule.CONSTANT
        ),
    )


def hf(folder: Path, path: Path, what: dict[str, Any]) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    made = rows(what["rows"], what["longest"])
    data = [{"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]} for ids, prompt in made]

    def collate(some: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        longest = -(-max(len(row["input_ids"]) for row in some) // 8) * 8
        ids = [row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in some]
        labels = [row["labels"] + [-100] * (longest - len(row["labels"])) for row in some]
        mask = [[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in some]
        tokens.append(sum(len(row["input_ids"]) for row in some))
        return {
            "input_ids": torch.tensor(ids),
            "labels": torch.tensor(labels),
            "attention_mask": torch.tensor(mask),
        }

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            stamps.append(now())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            stamps.append(now())

    stamps: list[tuple[float, float]] = []
    tokens: list[int] = []
    base = _dressed(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), what)
    arguments = TrainingArguments(
        output_dir=str(folder / "hf"),
        per_device_train_batch_size=what["micro"],
        max_steps=what["steps"],
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        seed=what.get("seed", 0),
        train_sampling_strategy="group_by_length" if what["grouped"] else "random",
    )
    Trainer(
        model=base, args=arguments, train_dataset=data, data_collator=collate, callbacks=[Watch()]
    ).train()
    return _measured(stamps, tokens) | {"held_out": _held_out(base, what)}


def axolotl(folder: Path, path: Path, what: dict[str, Any]) -> dict[str, Any]:
    from benchmarks import native_axolotl as engine

    folder.mkdir(parents=True, exist_ok=True)
    trained = engine.train(folder, path, rows(what["rows"], what["longest"]), what)
    return _measured(engine.stamps, engine.tokens) | {"held_out": _held_out(trained, what)}


def loader(folder: Path, path: Path, what: dict[str, Any]) -> dict[str, Any]:
    """Batches alone, as fast as they come."""
    from trainer.inputs.token_file import write_rows
    from trainer.native.batches import BatchLayout, SampleOrder, TokenRows
    from trainer.native.loader import BatchLoader

    made = rows(what["rows"], what["longest"])
    marked = [(ids, [at >= prompt for at in range(len(ids))]) for ids, prompt in made]
    file = write_rows(folder / "rows", VOCABULARY, marked)
    order = SampleOrder(file.lengths, what["longest"], what["micro"], 1, 1, group_by_length=what["grouped"])
    batches = BatchLoader(TokenRows(file, BatchLayout()), order, ahead=8)
    stamps, tokens = [now()], []
    for (batch,) in batches:
        tokens.append(batch.tokens)
        stamps.append(now())
        if len(tokens) == 20 * what["steps"]:
            break
    batches.close()
    return {"tokens_s": sum(tokens) / (stamps[-1][0] - stamps[0][0])}


def _dressed(base: Any, what: dict[str, Any]) -> Any:
    if what["method"] == "full":
        return base
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(
        base, LoraConfig(r=16, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    )


@torch.no_grad()
def _held_out(model: Any, what: dict[str, Any]) -> float:
    """On rows that nobody trained on, by tokens, the same way for all."""
    model.eval()
    summed, count = 0.0, 0
    for ids, prompt in rows(200, what["longest"], seed=1):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, prompt - 1 : -1]
        targets = torch.tensor(ids[prompt:])
        summed += float(torch.nn.functional.cross_entropy(logits.float(), targets, reduction="sum"))
        count += len(targets)
    return summed / count


def _measured(stamps: list[tuple[float, float]], tokens: list[int]) -> dict[str, Any]:
    """Without the first tenth, which allocates and warms up."""
    skip = max(len(stamps) // 10, 1)
    walls, shares = zip(*stamps[skip:], strict=True)
    seconds = [end - start for start, end in pairwise(walls)]
    used = sum(tokens[skip : skip + len(seconds)])
    return {
        "tokens_s": used / (walls[-1] - walls[0]),
        "tokens_cpu_s": used / (shares[-1] - shares[0]),
        "step_ms": 1e3 * statistics.median(seconds),
    }


def main() -> None:
    kind, folder, what = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    torch.set_num_threads(what.get("threads", 1))
    path = model(folder, what["layers"], what["width"])
    made = {"native": native, "hf": hf, "axolotl": axolotl, "loader": loader}[kind](folder / kind, path, what)
    print(json.dumps(made))


if __name__ == "__main__":
    main()
