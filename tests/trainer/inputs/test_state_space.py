"""Mamba's scan in matrix products, against the code of transformers that it replaces."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer import odd_models
from trainer.inputs import state_space
from trainer.inputs.model_loading import block_gpu_kernels
from trainer.inputs.state_space import FUSED, SCAN, scan, use_fast_scan

pytestmark = pytest.mark.small


@pytest.fixture
def falcon(monkeypatch: pytest.MonkeyPatch) -> Any:
    block_gpu_kernels()
    model = odd_models.falcon_h1()
    module = sys.modules[type(model).__module__]
    for name in (SCAN, FUSED):
        monkeypatch.setattr(module, name, getattr(module, name))  # put back afterwards
    return model


@pytest.mark.parametrize(
    ("tokens", "heads", "groups", "chunk", "begun"),
    [(37, 4, 2, 16, False), (64, 6, 1, 32, True), (5, 4, 4, 16, True), (16, 4, 1, 16, False)],
)
def test_values_gradients_and_states_are_transformers_own(
    falcon: Any, tokens: int, heads: int, groups: int, chunk: int, begun: bool
) -> None:
    chance = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=chance, requires_grad=True)

    x, dt = drawn(2, tokens, heads, 8), drawn(2, tokens, heads)
    b, c = drawn(2, tokens, groups, 12), drawn(2, tokens, groups, 12)
    decay, skip, bias = drawn(heads), drawn(heads), drawn(heads)
    state = torch.randn(2, heads, 8, 12, generator=chance) if begun else None
    results = []
    for compute in (getattr(sys.modules[type(falcon).__module__], SCAN), scan):
        output, last = compute(
            *(x, dt, -decay.exp(), b, c),
            chunk_size=chunk,
            D=skip,
            dt_bias=bias,
            dt_softplus=True,
            initial_states=state,
            return_final_states=True,
        )
        wave = torch.arange(output.numel()).reshape(output.shape).sin()
        learned = torch.autograd.grad((output * wave).sum() + last.pow(2).sum(), (x, dt, decay, b, c, skip))
        results.append((output, last, *learned))
    for ours, theirs in zip(*reversed(results), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_model_says_the_same_with_it_also_while_it_generates(falcon: Any) -> None:
    falcon.eval()
    ids = torch.arange(5, 45)[None]
    before = falcon(ids).logits, falcon.generate(ids, max_new_tokens=5, do_sample=False)
    use_fast_scan(falcon)
    assert getattr(sys.modules[type(falcon).__module__], SCAN) is scan
    after = falcon(ids).logits, falcon.generate(ids, max_new_tokens=5, do_sample=False)
    torch.testing.assert_close(after[0], before[0], rtol=1e-4, atol=1e-5)
    assert after[1].tolist() == before[1].tolist()


def test_kernels_stay_but_a_fused_one_without_its_convolution(
    falcon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules[type(falcon).__module__]
    kept, installed = (getattr(module, SCAN), getattr(module, FUSED)), {state_space.KERNELS}
    monkeypatch.setattr(state_space, "_there", installed.__contains__)
    use_fast_scan(falcon)
    assert getattr(module, SCAN) is kept[0]
    assert getattr(module, FUSED)() is None
    setattr(module, FUSED, kept[1])
    installed.add(state_space.CONVOLUTION)
    use_fast_scan(falcon)
    assert (getattr(module, SCAN), getattr(module, FUSED)) == kept


def test_packages_that_fail_at_their_import_are_not_there_and_other_models_do_without_trying(
    falcon: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def fails(name: str) -> None:
        tried.append(name)
        raise AttributeError("module 'triton' has no attribute 'jit'")

    monkeypatch.setattr(state_space.importlib, "import_module", fails)
    use_fast_scan(odd_models.KINDS["tied"]())
    assert tried == []
    use_fast_scan(falcon)
    assert getattr(sys.modules[type(falcon).__module__], SCAN) is scan
    assert tried == [state_space.KERNELS]
