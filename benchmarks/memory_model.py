"""The memory model against torch's own accounting.

Needs the training environment's Python in GOD_MINER_TRAINING_PYTHON (torch, transformers, peft, trl); it runs
`fake_memory.py` there, which measures the peak of a training step on pretended tensors. No GPU, no weights.
What the fake mode cannot see (CUDA's context, NCCL, fragmentation, DDP's buckets) is left out of both sides.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report import Report
from core.domain.choices import Attention, Engine, Method, Optimizer, Parallelism
from core.domain.hardware import GPU_KINDS
from core.domain.tasks import TaskType
from core.models.facts import ModelFacts
from core.models.identify import facts_from_name
from core.planning.candidate import NCCL_BUFFER, LossKind, RunCandidate, shape_of
from core.planning.memory.peak import moments

VARIABLE = "GOD_MINER_TRAINING_PYTHON"
UNSEEN = ("cuda", "fragmentation", "compile", "ddp buckets")
MODELS = {
    "Llama 1B": "meta-llama/Llama-3.2-1B",
    "Llama 8B": "meta-llama/Llama-3.1-8B",
    "Llama 70B": "meta-llama/Llama-3.1-70B",
    "Qwen 7B": "Qwen/Qwen2.5-7B",
    "LFM 1.2B": "LiquidAI/LFM2.5-1.2B-Base",
    "Falcon-H1 1.5B": "tiiuae/Falcon-H1-1.5B-Base",
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
        yield name, {**lora, "micro": 4, "length": 2048, "optimizer": "foreach", "rank": 512}
        yield name, {**lora, "micro": 4, "length": 2048, "accumulate": True, "rank": 512}
        full = {**lora, "method": "full", "rank": 0, "micro": 2, "length": 2048}
        yield name, {**full, "accumulate": True}
        if name not in SHARDS:
            yield name, {**full, "fp32_embeddings": True}


def facts_of(name: str) -> ModelFacts:
    """Facts with as many layers of one kind as of the other: two and four are measured."""
    facts = facts_from_name(MODELS[name])
    if facts.mixer is None or facts.mixer.heads:
        return facts
    half = facts.layers // 2
    mixer = facts.mixer.model_copy(update={"layers": half, "attention_layers": half})
    return facts.model_copy(update={"mixer": mixer})


def complete(name: str, case: dict[str, Any]) -> dict[str, Any]:
    """With what the measuring side needs to know."""
    model = facts_of(name)
    fields = ("hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "vocab")
    shape = {field: getattr(model, field) for field in fields}
    shape |= {"architecture": model.architecture, "tied_embeddings": model.tied_embeddings}
    shape |= {"mixer": model.mixer.model_dump()} if model.mixer else {}
    return {"dropout": 0.05, "optimizer": "fused", "shards": SHARDS.get(name, 1), **case, "shape": shape}


def setup_for(model: ModelFacts, case: dict[str, Any]) -> RunCandidate:
    plain = case.get("fp32_embeddings")
    return RunCandidate(
        task=TASKS[case.get("task", "sft")],
        engine=Engine.AXOLOTL,
        method=Method(case["method"]),
        shape=shape_of(model),
        kind=GPU_KINDS["H100-SXM"],
        world=case["shards"],
        node_gpus=case["shards"],
        nccl_buffer=NCCL_BUFFER,
        network=25e9 / 8,
        hybrid=False,
        parallelism=Parallelism.FSDP if case["shards"] > 1 else Parallelism.SINGLE,
        micro=case["micro"],
        accumulation=2 if case.get("accumulate") else 1,
        eval_micro=1,
        length=case["length"],
        completion=case.get("completion", 0),
        rank=case["rank"],
        dropout=case["dropout"] > 0,
        optimizer=Optimizer.ADAMW_TORCH if case["optimizer"] == "foreach" else Optimizer.ADAMW_TORCH_FUSED,
        fp32_master=False,
        width=2,
        checkpointing=case["checkpointing"],
        attention=Attention.SDPA if plain else Attention.FLASH_2,
        loss=LossKind(case["loss"]),
        liger=frozenset(),
        reshard=True,
        compile_mode=None,
        fp8=False,
        reference_ready=False,
        vllm_share=0.0,
        vllm_sleep=False,
        together=0,
        generations=8,
        kl=False,
        prompt_kl=False,
        gathered_layers=0,
        ema=False,
        image=None,
    )


def predict(name: str, case: dict[str, Any]) -> dict[str, float]:
    """Every moment that the measurement has too."""
    setup = setup_for(facts_of(name), case)
    return {
        one.phase: sum(term.bytes for term in one.terms if term.name not in UNSEEN)
        for one in moments(setup)
        if one.phase not in ("generation", "evaluation")
    }


def measure(asked: list[dict[str, Any]], python: str) -> Iterator[dict[str, Any]]:
    """One process for all: importing torch and its kin costs more than a case."""
    script = Path(__file__).with_name("fake_memory.py")
    with subprocess.Popen(
        ["nice", "-n", "10", python, str(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(script.parents[1])},
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps(asked))
        child.stdin.close()
        for line in child.stdout:
            yield json.loads(line)
    if child.returncode:
        raise RuntimeError(f"{python} {script} ended with {child.returncode}")


def compare(picked: list[tuple[str, dict[str, Any]]], python: str) -> list[Row]:
    asked = [complete(name, case) for name, case in picked]
    found = []
    for (name, _), one in zip(picked, measure(asked, python), strict=True):
        seen = {key: value for key, value in one["peaks"].items() if key != "evaluation"}
        found.append(Row(name, one["case"], max(predict(name, one["case"]).values()), max(seen.values())))
    return found


def run(quick: bool) -> Report:
    """All cases take some ten minutes on two cores, a quick look one."""
    report = Report(
        "Peak memory of one GPU in GiB: torch's accounting on pretended tensors, and the model",
        ("model", "method", "batch", "checkpointed", "loss", "measured", "model", "error", ""),
    )
    python = os.environ.get(VARIABLE)
    if not python:
        report.notes.append(
            f"Not measured: {VARIABLE} is not set (`make training` makes such an environment)."
        )
        return report
    found = compare(list(cases())[:: 7 if quick else 1], python)
    report.rows = [shown(row) for row in found]
    report.notes.append(summary(found))
    report.data["cases"] = [row._asdict() for row in found]
    return report


def shown(row: Row) -> tuple[str, ...]:
    case = row.case
    extra = [key for key in ("accumulate", "fp32_embeddings") if case.get(key)]
    extra += ["no dropout"] if not case["dropout"] else []
    extra += ["foreach"] if case["optimizer"] == "foreach" else []
    extra += [] if row.holds else ["TOO LITTLE"]
    return (
        row.name,
        f"rank {case['rank']}" if case["rank"] else "full",
        f"{case['micro']}x{case['length']}",
        "yes" if case["checkpointing"] else "no",
        case.get("task", case["loss"]),
        f"{row.measured / 2**30:.2f}",
        f"{row.predicted / 2**30:.2f}",
        f"{row.error:+.1%}",
        ", ".join(extra),
    )


def summary(found: list[Row]) -> str:
    errors = sorted(row.error for row in found)
    near = sum(abs(error) <= 0.10 for error in errors)
    held = sum(row.holds for row in found)
    mean = sum(abs(error) for error in errors) / len(errors)
    return (
        f"{len(found)} cases: {held / len(found):.1%} within 10% or on the safe side, "
        f"{near / len(found):.1%} within 10% either way; mean absolute error {mean:.1%}, "
        f"from {errors[0]:+.1%} to {errors[-1]:+.1%}."
    )
