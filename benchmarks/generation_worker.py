"""Runs inside the training environment, for `generation.py`: two processes, three ways to generate."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from tests.trainer.sharding import main, split
from trainer.generating import generate_well

ASKED = "GOD_MINER_ASKED"


def _model(asked: dict[str, Any]) -> Any:
    """The same on every rank."""
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
    return get_peft_model(
        LlamaForCausalLM(config), LoraConfig(r=asked["rank"], target_modules="all-linear")
    ).eval()


def measure(rank: int) -> None:
    asked = json.loads(os.environ[ASKED])
    gathers = _Gathers()
    models = {"whole": _model(asked), "once": split(_model(asked), True), "token": split(_model(asked), True)}
    generate_well(models["once"], True, True, contextlib.nullcontext)
    ids = torch.arange(8 * 32).reshape(8, 32) % 1900 + 5
    seconds: dict[str, list[float]] = {way: [] for way in models}
    counts: dict[str, int] = {}
    answers: dict[str, torch.Tensor] = {}
    for turn in range(asked["rounds"] + 1):
        for way, model in models.items():
            dist.barrier()
            began, gathers.count = time.perf_counter(), 0
            answers[way] = model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=asked["tokens"],
                do_sample=False,
            )
            dist.barrier()
            counts[way] = gathers.count
            if turn:  # the first warms up
                seconds[way].append(time.perf_counter() - began)
    same = all(torch.equal(answers["whole"], one) for one in answers.values())
    if rank == 0:
        sys.stdout.write(json.dumps({"seconds": seconds, "gathers": counts, "same": same}) + "\n")


class _Gathers:
    def __init__(self) -> None:
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group as module

        self.count, self._plain = 0, module.foreach_all_gather
        module.foreach_all_gather = self

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.count += 1
        return self._plain(*arguments, **named)


if __name__ == "__main__":
    os.environ[ASKED] = sys.argv[1]
    raise SystemExit(main("benchmarks.generation_worker:measure", 2))
