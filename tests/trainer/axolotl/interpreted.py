"""Liger's and Axolotl's kernels on a CPU: `python -m tests.trainer.axolotl.interpreted liger:llama lora:phi`.

With TRITON_INTERPRET=1 in the environment Triton's kernels run as Python. Prints for each how far a training
step with them is from transformers' own: in the loss, and in the gradient that differs most, relative to its
largest entry.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import traceback
from typing import Any

import torch
import transformers
import triton
import triton.language as tl
from axolotl.integrations.liger.plugin import LigerPlugin
from axolotl.kernels import geglu, swiglu
from axolotl.monkeypatch.lora_kernels import apply_lora_kernel_patches, patch_self_attn_lora
from axolotl.utils.dict import DictDefault
from peft import LoraConfig, get_peft_model

from core.models.kernels import liger_parts
from core.recipes.axolotl.rules import LORA_KERNELS as LORA_KEYS
from trainer.inputs.adapter_targets import linear_names

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA = {"head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
MORE: dict[str, dict[str, Any]] = {
    "gemma": {"head_dim": 8},
    "gemma2": GEMMA,
    "gemma3_text": GEMMA,
    "gemma3": GEMMA,
    "qwen3": {"head_dim": 8},
    "falcon_h1": {
        "mamba_d_ssm": 32,
        "mamba_n_heads": 4,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
        "mlp_multipliers": [0.5, 0.25],
        "lm_head_multiplier": 0.5,
    },
    "glm4": {"head_dim": 8},
    "mixtral": EXPERTS,
    "qwen3_moe": {**EXPERTS, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16},
}
EYES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


@triton.jit
def rsqrt(x):  # type: ignore[no-untyped-def]
    return 1 / tl.sqrt(x)


@triton.jit
def tanh(x):  # type: ignore[no-untyped-def]
    return 2 * tl.sigmoid(2 * x) - 1


class OnCpu:
    """torch, where kernels name the GPU as the place of their results."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *shape: Any, device: str, **given: Any) -> Any:
        return torch.empty(*shape, **given)


def stand_in_for_the_gpu() -> None:
    """CUDA's own functions have no body in the interpreter."""
    for name, module in list(sys.modules.items()):
        if name.startswith("liger_kernel.ops"):
            for function in (rsqrt, tanh):
                if hasattr(module, function.__name__):
                    setattr(module, function.__name__, function)
    geglu.torch = swiglu.torch = OnCpu()


def config_of(kind: str) -> Any:
    given = {**SHAPE, **MORE.get(kind, {})}
    if kind != "gemma3":
        config = transformers.AutoConfig.for_model(kind, **given)
    else:
        config = transformers.Gemma3Config(
            text_config=transformers.Gemma3TextConfig(**given).to_dict(),
            vision_config={**EYES, "image_size": 28, "patch_size": 14},
            mm_tokens_per_image=4,
            image_token_index=5,
            boi_token_index=6,
            eoi_token_index=7,
        )
    config._attn_implementation = "eager"
    return config


def made(config: Any) -> Any:
    """With norms that are not at one, and biases not at zero."""
    torch.manual_seed(0)
    auto = transformers.AutoModelForCausalLM
    if config.model_type == "gemma3":
        model: Any = transformers.Gemma3ForConditionalGeneration(config)
    else:
        model = auto.from_config(config)
    model = model.float().train()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    return model


def adapted(model: Any) -> Any:
    torch.manual_seed(1)
    given = LoraConfig(r=4, lora_alpha=8, target_modules=linear_names(model), task_type="CAUSAL_LM")
    model = get_peft_model(model, given)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.normal_(std=0.1)
    return model.train()


def step(model: Any) -> tuple[float, dict[str, Any]]:
    torch.manual_seed(2)
    ids = torch.randint(8, SHAPE["vocab_size"], (2, 7))
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[:, :2], labels[1, 5:], mask[1, 5:] = -100, -100, 0
    pictures = {"token_type_ids": torch.zeros_like(ids)} if model.config.model_type == "gemma3" else {}
    loss = model(input_ids=ids, attention_mask=mask, labels=labels, **pictures).loss
    loss.backward()
    weights = model.named_parameters()
    return float(loss.detach()), {name: item.grad for name, item in weights if item.grad is not None}


def gap(plain: tuple[float, dict[str, Any]], fast: tuple[float, dict[str, Any]]) -> tuple[float, float]:
    (loss, gradients), (other_loss, others) = plain, fast
    assert gradients.keys() == others.keys()
    worst = max(
        float((gradient - others[name]).abs().max() / (gradient.abs().max() + 1e-12))
        for name, gradient in gradients.items()
    )
    return abs(loss - other_loss), worst


def liger_gap(kind: str) -> tuple[float, float]:
    config = config_of(kind)
    plain = step(made(config))
    keys = {part.value: True for part in liger_parts(kind)}
    LigerPlugin().pre_model_load(DictDefault(model_config_type=kind, **keys))
    stand_in_for_the_gpu()
    return gap(plain, step(made(config)))


def lora_gap(kind: str) -> tuple[float, float]:
    config = config_of(kind)
    plain = step(adapted(made(config)))
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        cfg = DictDefault(base_model=folder, **dict.fromkeys(LORA_KEYS, True))
        patch_self_attn_lora(cfg)
    stand_in_for_the_gpu()
    return gap(plain, step(apply_lora_kernel_patches(adapted(made(config)), cfg)))


def main(named: list[str]) -> None:
    """`liger:llama`, `lora:phi3`; each in a process of its own, because classes are replaced for good."""
    for heavy in ("trl.experimental.orpo", "liger_kernel.transformers.monkey_patch"):
        importlib.import_module(heavy)  # once for all
    ways = {"liger": liger_gap, "lora": lora_gap}
    for name in named:
        way, _, kind = name.partition(":")
        child = os.fork()
        if child == 0:
            code = 1
            try:
                sys.stdout.write(json.dumps([name, *ways[way](kind)]) + "\n")
                code = 0
            except Exception:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{name} failed")


if __name__ == "__main__":
    main(sys.argv[1:])
