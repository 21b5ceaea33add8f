"""Mamba-2's scan in matrix products, in the place of transformers' own code without kernels.

That multiplies every pair of tokens of a chunk with every state of every head before it sums: 12 MB per token
and layer of Falcon-H1 1.5B in fp32, written and read again. As products the same sums need 50 KB a time.
"""

from __future__ import annotations

import importlib
import logging
import sys
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

log = logging.getLogger(__name__)

#: Names in transformers' modules, whoever computes them, and the packages with kernels for them.
SCAN, FUSED = "mamba2_chunk_scan", "mamba2_split_conv1d_scan_combined"
KERNELS, CONVOLUTION = "mamba_ssm", "causal_conv1d"


def scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: Any,
) -> Any:
    """Output per head, (batch, tokens, heads, width), and the last state; the arguments are those of the
    function that it replaces. In fp32, whatever is cast outside: the evaluation's is."""
    with torch.autocast(hidden_states.device.type, enabled=False):
        dt = dt.float() if dt_bias is None else dt.float() + dt_bias.float()
        steps = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
        values, groups = hidden_states.float(), B.shape[2]
        chunks = _Chunks(
            x=_chunked(values * steps[..., None], chunk_size, groups),
            decay=_chunked((steps * A.float())[..., None], chunk_size, groups).squeeze(-1).cumsum(2),
            b=_chunked(B.float(), chunk_size, groups).squeeze(4),
            c=_chunked(C.float(), chunk_size, groups).squeeze(4),
        )
        between, state = _between_chunks(chunks, initial_states)
        output = (_within_chunks(chunks) + between).reshape(len(values), -1, *values.shape[2:])
        output = output[:, : values.shape[1]]
        if D is not None:
            output = output + D.float()[..., None] * values
        output = output.contiguous()  # the caller takes a view
        final = state.flatten(1, 2)
    return (output, final) if return_final_states else output


class _Chunks(NamedTuple):
    """By batch, chunk, token, group of heads and, but for `b` and `c`, which a group shares, head."""

    x: Tensor
    #: The logarithm of what is left, from the chunk's beginning on.
    decay: Tensor
    b: Tensor
    c: Tensor


def _chunked(tokens: Tensor, size: int, groups: int) -> Tensor:
    batch, length, heads, width = tokens.shape
    padded = F.pad(tokens, (0, 0, 0, 0, 0, -length % size))
    return padded.reshape(batch, -1, size, groups, heads // groups, width)


def _within_chunks(chunks: _Chunks) -> Tensor:
    """Each token's share in every later one of its chunk."""
    x, decay, b, c = chunks
    later = torch.ones(x.shape[2], x.shape[2], dtype=torch.bool, device=x.device).tril()
    over = (decay[:, :, :, None] - decay[:, :, None]).masked_fill(~later[:, :, None, None], float("-inf"))
    weights = over.exp() * torch.einsum("kclgn,kcsgn->kclsg", c, b)[..., None]
    return torch.einsum("kclsgh,kcsghp->kclghp", weights, x)


def _between_chunks(chunks: _Chunks, initial: Tensor | None) -> tuple[Tensor, Tensor]:
    """Share of the state before each chunk, which fades within it, and the state after the last."""
    x, decay, b, c = chunks
    fading = (decay[:, :, -1:] - decay).exp()[..., None]
    added = torch.einsum("kcsgn,kcsghp->kcghpn", b, fading * x)
    state = torch.zeros_like(added[:, 0])
    if initial is not None:
        state = initial.float().reshape(state.shape)
    before = []
    for number in range(added.shape[1]):
        before.append(state)
        state = state * decay[:, number, -1].exp()[..., None, None] + added[:, number]
    carried = torch.einsum("kclgn,kcghpn->kclghp", c, torch.stack(before, 1))
    return carried * decay.exp()[..., None], state


def use_fast_scan(model: Any) -> None:
    """Kernels stay where they are installed; but Mamba's fused one calls another package's convolution, and
    without that it is left out."""
    modules = {sys.modules[type(part).__module__] for part in model.modules()}
    for module in modules:
        if not hasattr(module, SCAN):
            continue  # nor are the packages imported, which takes seconds
        if not _there(KERNELS):
            setattr(module, SCAN, scan)
            log.info("%s: Mamba's scan is computed in matrix products", module.__name__)
        elif not _there(CONVOLUTION) and hasattr(module, FUSED):
            setattr(module, FUSED, lambda *_, **__: None)


def _there(package: str) -> bool:
    try:
        importlib.import_module(package)
    except Exception:  # noqa: BLE001 - not there, blocked, or made for another torch: transformers goes without
        return False
    return True
