"""Runs inside the training environment, for `generation.py` and `sharded_step.py`: two that share a model."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tests.trainer.sharding import Gathers, main, split
from trainer.axolotl.patches import patch_generate

ASKED = "GOD_MINER_ASKED"
Work = Callable[[], torch.Tensor]


def _model(asked: dict[str, Any]) -> Any:
    """The same on every rank: frozen in bf16, its adapter in fp32."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2000,
        hidden_size=asked["hidden"],
        intermediate_size=3 * asked["hidden"],
        num_hidden_layers=asked["layers"],
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        eos_token_id=None,
    )
    adapter = LoraConfig(r=asked["rank"], target_modules="all-linear")
    return get_peft_model(LlamaForCausalLM(config), adapter).eval()


def _ids() -> torch.Tensor:
    return torch.arange(8 * 32).reshape(8, 32) % 1900 + 5


def _generation(asked: dict[str, Any]) -> dict[str, Work]:
    models = {"whole": _model(asked), "once": split(_model(asked)), "half": split(_model(asked))}
    models["token"] = split(_model(asked), True)
    for way, part in (("once", 1), ("half", 1 / 2)):
        patch_generate(models[way], part, True, contextlib.nullcontext)
    ids = _ids()

    def work(model: Any) -> Work:
        return lambda: model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=asked["tokens"],
            do_sample=False,
        )

    return {way: work(model) for way, model in models.items()}


def _step(asked: dict[str, Any]) -> dict[str, Work]:
    """The loss of every step, from the same beginning."""
    from torch.nn.parallel import DistributedDataParallel

    ways = {
        "ddp": DistributedDataParallel(_model(asked)),
        "layers": split(_model(asked)),
        "matrices": split(_model(asked), True),
    }
    ids = _ids()[:, : asked["tokens"]]

    def work(model: Any) -> Work:
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-3)

        def step() -> torch.Tensor:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    return {way: work(model) for way, model in ways.items()}


def measure(rank: int) -> None:
    asked = json.loads(os.environ[ASKED])
    gathers = Gathers()
    works = {"generation": _generation, "step": _step}[asked["what"]](asked)
    seconds: dict[str, list[float]] = {way: [] for way in works}
    counts: dict[str, int] = {}
    same = True
    for turn in range(asked["rounds"] + 1):
        found = []
        for way, work in works.items():
            dist.barrier()
            began, gathers.count = time.perf_counter(), 0
            found.append(work())
            dist.barrier()
            counts[way] = gathers.count
            if turn:  # the first warms up
                seconds[way].append(time.perf_counter() - began)
        same &= all(torch.allclose(found[0].float(), one.float(), atol=1e-3) for one in found)
    if rank == 0:
        sys.stdout.write(json.dumps({"seconds": seconds, "gathers": counts, "same": same}) + "\n")


if __name__ == "__main__":
    os.environ[ASKED] = sys.argv[1]
    raise SystemExit(main("benchmarks.sharding_worker:measure", 2))
