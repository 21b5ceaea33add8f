"""The lean forward pass of LoRA against PEFT's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from trainer.native.lora import LeanLoraLinear

pytestmark = pytest.mark.small


class Layers(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(24, 40, dtype=dtype)
        self.second = nn.Linear(40, 8, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)))


def adapted(lean: bool, dtype: torch.dtype = torch.float32, **settings: Any) -> nn.Module:
    """Equal weights each time it is called; the adapter changes the output."""
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=12, target_modules=["first", "second"], **settings)
    if lean:
        config._register_custom_module({nn.Linear: LeanLoraLinear})
    model: nn.Module = get_peft_model(Layers(dtype), config)
    assert lean == any(isinstance(module, LeanLoraLinear) for module in model.modules())
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) / 4)
    return model


def trained_pass(model: nn.Module, given: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(2)  # dropout's
    out = model(given)
    out.float().square().mean().backward()
    return out, {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


@pytest.mark.parametrize(
    "settings",
    [{}, {"lora_dropout": 0.3}, {"use_rslora": True}, {"use_dora": True}],
    ids=["plain", "dropout", "rslora", "dora"],
)
def test_output_and_gradients_are_pefts(settings: dict[str, Any]) -> None:
    given = torch.randn(3, 5, 24, requires_grad=True)
    other = given.detach().clone().requires_grad_()
    out, gradients = trained_pass(adapted(True, **settings), given)
    theirs, wanted = trained_pass(adapted(False, **settings), other)
    torch.testing.assert_close(out, theirs)
    torch.testing.assert_close(gradients, wanted)
    torch.testing.assert_close(given.grad, other.grad)
    assert len(gradients) >= 4


def test_switched_off_it_is_the_base() -> None:
    model, given = adapted(True), torch.randn(2, 3, 24)
    with model.disable_adapter():
        off = model(given)
    torch.manual_seed(0)
    torch.testing.assert_close(off, Layers(torch.float32)(given))
    assert not torch.allclose(model(given), off)


@contextmanager
def kept_bytes(found: list[int]) -> Iterator[None]:
    """What the passes inside keep for their backward passes, each tensor once."""
    seen: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        seen[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield
    found.append(sum(tensor.untyped_storage().nbytes() for tensor in seen.values()))


def test_beside_bf16_an_fp32_adapter_learns_in_fp32_and_copies_nothing_to_it() -> None:
    bytes_kept: list[int] = []
    given = torch.randn(64, 24, dtype=torch.bfloat16)
    lean, peft = adapted(True, torch.bfloat16), adapted(False, torch.bfloat16)
    for model in (lean, peft):
        with kept_bytes(bytes_kept):
            model(given)
    assert bytes_kept[0] < 0.75 * bytes_kept[1]
    out, gradients = trained_pass(lean, given)
    theirs, wanted = trained_pass(peft, given)
    torch.testing.assert_close(out, theirs, rtol=0.03, atol=0.03)
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.float32
        largest = float(wanted[name].abs().max())
        torch.testing.assert_close(gradient, wanted[name], rtol=0.05, atol=largest / 20)
