"""The memory model against torch's own bookkeeping: `python -m benchmarks.memory_model`.

Needs the training environment's Python in GOD_MINER_TRAINING_PYTHON (torch, transformers, peft, trl); it runs
`fake_memory.py` there, which measures the peak of a training step on pretended tensors. No GPU, no weights.
What the fake mode cannot see (CUDA's context, NCCL, fragmentation, DDP's buckets) is left out of both sides.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from core.choices import Attention, Engine, Method, Optimizer, Parallelism
from core.hardware import KINDS
from core.model_facts import facts_from_name
from core.models import ModelFacts
from core.planning.memory import moments
from core.planning.setup import Loss, Setup
from core.planning.shape import shape_of
from core.tasks import TaskType

UNSEEN = ("cuda", "fragmentation", "compile", "ddp buckets")
MODELS = {
    "Llama 1B": "meta-llama/Llama-3.2-1B",
    "Llama 8B": "meta-llama/Llama-3.1-8B",
    "Llama 70B": "meta-llama/Llama-3.1-70B",
    "Qwen 7B": "Qwen/Qwen2.5-7B",
}
#: Sharded over so many GPUs, where one cannot hold the model at all.
SHARDS = {"Llama 70B": 8}
TASKS = {"sft": TaskType.INSTRUCT, "dpo": TaskType.DPO, "grpo": TaskType.GRPO}


class Row(NamedTuple):
    name: str
    case: dict[str, Any]
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def holds(self) -> bool:
        """Within 10 %, or too careful."""
        return self.error >= -0.10


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """Shapes × tokens × method and rank × checkpointing × loss."""
    sizes = ((1, 512), (2, 1024), (4, 2048), (8, 4096))
    methods: tuple[dict[str, Any], ...] = (
        {"method": "full", "rank": 0},
        *({"method": "lora", "rank": rank} for rank in (16, 128, 512)),
    )
    for name, (micro, length), method, checkpointing, loss in itertools.product(
        MODELS, sizes, methods, (True, False), ("full", "fused")
    ):
        yield name, {"micro": micro, "length": length, "checkpointing": checkpointing, "loss": loss, **method}
    lora = {"method": "lora", "rank": 64, "checkpointing": True, "loss": "full"}
    for name in MODELS:
        yield name, {**lora, "micro": 4, "length": 1024, "task": "dpo"}
        yield name, {**lora, "micro": 16, "length": 768, "completion": 256, "task": "grpo"}
        yield name, {**lora, "micro": 4, "length": 2048, "dropout": 0.0}
        yield name, {**lora, "micro": 4, "length": 2048, "loss": "chunked"}
        yield name, {**lora, "micro": 4, "length": 512, "loss": "chunked", "checkpointing": False}
        yield name, {**lora, "micro": 4, "length": 2048, "adapter_fp32": False, "checkpointing": False}
        yield name, {**lora, "micro": 4, "length": 2048, "optimizer": "foreach", "rank": 512}
        yield name, {**lora, "micro": 4, "length": 2048, "accumulate": True, "rank": 512}
        full = {**lora, "method": "full", "rank": 0, "micro": 2, "length": 2048}
        yield name, {**full, "accumulate": True}
        if name not in SHARDS:
            yield name, {**full, "fp32_embeddings": True}


def complete(name: str, case: dict[str, Any]) -> dict[str, Any]:
    """With what the measuring side needs to know."""
    model = facts_from_name(MODELS[name])
    fields = ("hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "vocab")
    shape = {field: getattr(model, field) for field in fields}
    shape |= {"architecture": model.architecture, "tied_embeddings": model.tied_embeddings}
    return {"dropout": 0.05, "optimizer": "fused", "shards": SHARDS.get(name, 1), **case, "shape": shape}


def setup_for(model: ModelFacts, case: dict[str, Any]) -> Setup:
    plain = case.get("fp32_embeddings")
    return Setup(
        task=TASKS[case.get("task", "sft")],
        engine=Engine.AXOLOTL,
        method=Method(case["method"]),
        shape=shape_of(model),
        kind=KINDS["H100-SXM"],
        world=case["shards"],
        parallelism=Parallelism.FSDP if case["shards"] > 1 else Parallelism.SINGLE,
        micro=case["micro"],
        accumulation=2 if case.get("accumulate") else 1,
        eval_micro=1,
        length=case["length"],
        completion=case.get("completion", 0),
        rank=case["rank"],
        adapter_fp32=case.get("adapter_fp32", True),
        dropout=case["dropout"] > 0,
        optimizer=Optimizer.ADAMW_TORCH if case["optimizer"] == "foreach" else Optimizer.ADAMW_TORCH_FUSED,
        fp32_master=False,
        width=2,
        checkpointing=case["checkpointing"],
        offload=False,
        attention=Attention.SDPA if plain else Attention.FLASH_2,
        loss=Loss(case["loss"]),
        reshard=True,
        compile_mode=None,
        fp8=False,
        reference_ready=False,
        vllm_share=0.0,
        generations=8,
        kl=False,
        picture=None,
    )


def predict(name: str, case: dict[str, Any]) -> dict[str, float]:
    """Every moment that the measurement has too."""
    setup = setup_for(facts_from_name(MODELS[name]), case)
    return {
        phase: sum(term.bytes for term in terms if term.name not in UNSEEN)
        for phase, terms in moments(setup)
        if phase not in ("generation", "evaluation")
    }


def measure(asked: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    python = os.environ.get("GOD_MINER_TRAINING_PYTHON")
    if not python:
        sys.exit(
            "set GOD_MINER_TRAINING_PYTHON to the training environment's Python (torch, transformers, peft)"
        )
    script = Path(__file__).with_name("fake_memory.py")
    with subprocess.Popen(
        ["nice", "-n", "10", python, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps(asked))
        child.stdin.close()
        for line in child.stdout:
            yield json.loads(line)


def rows(picked: list[tuple[str, dict[str, Any]]]) -> Iterator[Row]:
    asked = [complete(name, case) for name, case in picked]
    for (name, _), found in zip(picked, measure(asked), strict=True):
        case = found["case"]
        seen = {key: value for key, value in found["peaks"].items() if key != "evaluation"}
        yield Row(name, case, max(predict(name, case).values()), max(seen.values()))


def show(row: Row) -> str:
    case = row.case
    how = case.get("task", "sft") if "task" in case else case["loss"]
    extra = [key for key in ("accumulate", "fp32_embeddings") if case.get(key)]
    extra += ["no dropout"] if not case["dropout"] else []
    extra += ["bf16 adapter"] if case.get("adapter_fp32") is False else []
    extra += ["foreach"] if case["optimizer"] == "foreach" else []
    method = f"r{case['rank']}" if case["rank"] else "full"
    batch = f"{case['micro']}x{case['length']}"
    saved = "ckpt" if case["checkpointing"] else "-"
    return (
        f"{row.name:<10} {method:<5} {batch:>8} {saved:<4} {how:<8} {row.measured / 2**30:8.2f} "
        f"{row.predicted / 2**30:8.2f} {row.error:+7.1%}{'' if row.holds else ' <<<'} {', '.join(extra)}"
    ).rstrip()


def summary(found: list[Row]) -> str:
    errors = sorted(row.error for row in found)
    near = sum(abs(error) <= 0.10 for error in errors)
    held = sum(row.holds for row in found)
    mean = sum(abs(error) for error in errors) / len(errors)
    return (
        f"{len(found)} cases: {held / len(found):.1%} within 10% or on the safe side, "
        f"{near / len(found):.1%} within 10% either way; mean absolute error {mean:.1%}, "
        f"from {errors[0]:+.1%} to {errors[-1]:+.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="only every n-th case, for a quick look")
    parser.add_argument("--raw", type=Path, help="also keep the measurements, as JSON lines")
    options = parser.parse_args()
    picked = list(cases())[:: options.every]
    print(
        f"{'model':<10} {'what':<5} {'batch':>8} {'':<4} {'loss':<8} "
        f"{'measured':>8} {'model':>8} {'error':>7}  (GiB)"
    )
    found = []
    for row in rows(picked):
        found.append(row)
        print(show(row), flush=True)
    print(summary(found))
    if options.raw:
        options.raw.write_text("".join(json.dumps(row._asdict()) + "\n" for row in found))
    if sum(row.holds for row in found) < 0.95 * len(found):
        sys.exit("fewer than 95% of the cases are within 10% or on the safe side")


if __name__ == "__main__":
    main()
