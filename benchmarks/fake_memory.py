"""Runs inside the training environment: peak memory of a training step on pretended tensors, as JSON lines.

    echo '[{"shape": {...}, "method": "lora", ...}]' | training-python benchmarks/fake_memory.py

One real Hugging Face model of few layers, real PEFT, autocast and AdamW run under torch's fake mode: every
tensor has a size and no contents. A counter adds up the storages that are alive. Pretended *cuda*
tensors abort the process on a torch without CUDA, so they pretend to lie on the CPU.

The peak at each moment of a step grows by the same amount with every layer, so two small models give the
large one: each moment is extrapolated by itself, because which of them is the worst changes with depth.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils.operations import convert_outputs_to_fp32
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, FalconH1Config, Lfm2Config, LlamaConfig, Qwen2Config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trainer.inputs.adapter_targets import keep_what_loads
from trainer.inputs.state_space import use_fast_scan

# — attention with flash attention's memory: the output and one fp32 per row and head


@torch.library.custom_op("planner::rows", mutates_args=())
def rows_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@rows_forward.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("planner::rows_backward", mutates_args=())
def rows_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


@rows_backward.register_fake
def _(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse)


def _backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
    q, k, v, _out, lse = ctx.saved_tensors
    # The kernel accumulates dq in fp32 beside the bf16 result.
    accumulator = torch.empty_like(q, dtype=torch.float32)
    result = torch.ops.planner.rows_backward(grad, q, k, v, lse)
    del accumulator
    return result


torch.library.register_autograd("planner::rows", _backward, setup_context=_save)


def attention(module: nn.Module, q: Any, k: Any, v: Any, mask: Any, **_: Any) -> Any:
    out, _lse = torch.ops.planner.rows(q, k, v)
    return out.transpose(1, 2).contiguous(), None


ALL_ATTENTION_FUNCTIONS.register("planner_rows", attention)


class DropoutAsOnCuda(torch.autograd.Function):
    """The CUDA kernel keeps one byte per element; the CPU's keeps a mask as wide as the input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.empty_like(x, dtype=torch.bool))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(grad)


def _dropout(self: nn.Dropout, x: torch.Tensor) -> torch.Tensor:
    return DropoutAsOnCuda.apply(x) if self.training and self.p > 0 else x


nn.Dropout.forward = _dropout  # type: ignore[method-assign]


# — losses without the full fp32 logits


class FusedLoss(torch.autograd.Function):
    """Liger's fused linear cross-entropy: gradients are made in the forward pass, logits chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows, width = hidden.shape
        chunks = -(-weight.shape[0] // width)
        size = 1 << (max(1, -(-rows // chunks)) - 1).bit_length()
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight) if weight.requires_grad else None
        loss = hidden.new_zeros(rows, dtype=torch.float32)
        logits = hidden.new_empty((min(size, rows), weight.shape[0]))
        if grad_weight is not None:
            update = torch.empty_like(weight)
            del update
        del logits
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return ctx.saved_tensors


class CompiledChunk(torch.autograd.Function):
    """One chunk of Axolotl's chunked cross-entropy, compiled: the chunk's logits and one fp32 per row."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        lse = logits.new_empty(logits.shape[0], dtype=torch.float32)
        ctx.save_for_backward(logits, lse)
        return lse.sum()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        logits, _ = ctx.saved_tensors
        return torch.empty_like(logits)


def chunked_loss(logits: torch.Tensor, labels: torch.Tensor, **_: Any) -> torch.Tensor:
    chunks = logits.chunk(8, dim=1)
    return sum(CompiledChunk.apply(part.reshape(-1, part.size(-1))) for part in chunks)  # type: ignore[return-value]


# — the counter


class Live(TorchDispatchMode):
    """Bytes of all storages alive, and the peak since the last mark."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        #: By storage: its size, and what fires when it is gone.
        self.seen: dict[int, tuple[int, Any]] = {}

    def _gone(self, key: int) -> None:
        self.now -= self.seen.pop(key)[0]

    def track(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.seen:
            return
        # The allocator hands out blocks of 512 bytes.
        size = -(-storage.nbytes() // 512) * 512
        self.seen[key] = size, weakref.finalize(storage, self._gone, key)
        self.now += size
        self.peak = max(self.peak, self.now)

    def mark(self) -> int:
        peak, self.peak = self.peak, self.now
        return peak

    def resize(self, tensor: torch.Tensor, size: int) -> None:
        """FSDP gives and takes a gathered parameter's storage without an operation that we would see."""
        storage = tensor.untyped_storage()
        known = self.seen.pop(storage._cdata, None)
        if known is not None:
            self.now -= known[0]
            known[1].detach()
        storage.resize_(size)
        self.track(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented  # its own dispatch first: the local shard is what lies in memory
        result = func(*args, **(kwargs or {}))
        if func.namespace != "prim":
            for leaf in tree_leaves(result):
                if isinstance(leaf, torch.Tensor):
                    self.track(leaf)
        return result


# — one case


def config_of(shape: dict[str, Any], layers: int, attn: str) -> Any:
    kind, mixer = KINDS.get(shape["architecture"], LlamaConfig), shape.get("mixer")
    more: dict[str, Any] = {}
    if shape["architecture"] == "lfm2":  # as many layers of one kind as of the other
        more = {"block_auto_adjust_ff_dim": False, "layer_types": ["conv", "full_attention"] * (layers // 2)}
    elif mixer:
        sizes = {"d_ssm": "inner", "n_heads": "heads", "d_state": "state", "chunk_size": "chunk"}
        more = {f"mamba_{name}": mixer[size] for name, size in sizes.items()}
    return kind(
        **more,
        hidden_size=shape["hidden"],
        intermediate_size=shape["intermediate"],
        num_hidden_layers=layers,
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        head_dim=shape["head_dim"],
        vocab_size=shape["vocab"],
        max_position_embeddings=131072,
        tie_word_embeddings=shape["tied_embeddings"],
        attn_implementation=attn,
        use_cache=False,
    )


KINDS = {"qwen2": Qwen2Config, "lfm2": Lfm2Config, "falcon_h1": FalconH1Config}


def build(case: dict[str, Any], layers: int) -> nn.Module:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config_of(case["shape"], layers, "planner_rows"), dtype=torch.bfloat16
        )
        if case["method"] == "full":
            upcast(model) if case.get("fp32_embeddings") else None
        else:
            model.requires_grad_(False)
            lora = LoraConfig(
                r=case["rank"],
                lora_alpha=32,
                lora_dropout=case.get("dropout", 0.05),
                target_modules="all-linear",
            )
            keep_what_loads(model, lora)
            model = get_peft_model(model, lora, low_cpu_mem_usage=True)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.to(torch.float32)
    return model


def upcast(model: nn.Module) -> None:
    """Apply what Axolotl does to a full fine-tune whose attention is sdpa or eager."""
    for name, module in model.named_modules():
        if "norm" in name or name.endswith(("embed_tokens", "lm_head")):
            module.float()


def materialise(model: nn.Module) -> None:
    """Meta parameters become pretended CPU ones; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                fresh = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
                made[id(parameter)] = nn.Parameter(fresh, requires_grad=parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")


def decoder(model: nn.Module) -> Any:
    return model.base_model.model if hasattr(model, "base_model") and hasattr(model, "peft_config") else model


def optimizer_of(case: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    fused = case.get("optimizer", "fused") == "fused"
    # Fused kernels refuse pretended CPU bf16 in some builds; their memory is the states' and nothing else.
    return torch.optim.AdamW(trained, lr=1e-4, fused=fused, foreach=not fused)


@contextlib.contextmanager
def moments(model: Any, live: Live, peaks: dict[str, int]) -> Iterator[None]:
    """Splits the backward pass at the gradient of the last and of the first layer's output."""
    layers = model.model.layers
    hooks = []

    def note(name: str) -> Any:
        def hook(grad: torch.Tensor) -> None:
            peaks[name] = max(peaks.get(name, 0), live.mark())

        return hook

    def on_last(module: nn.Module, args: Any, output: Any) -> None:
        # Only the forward pass: the recomputation calls the module again.
        peaks.setdefault("layers", live.mark())
        tensor = output[0] if isinstance(output, tuple) else output
        if tensor.requires_grad:
            tensor.register_hook(note("loss"))

    def on_first(module: nn.Module, args: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        if tensor.requires_grad:
            tensor.register_hook(note("top"))

    hooks.append(layers[-1].register_forward_hook(on_last))
    hooks.append(layers[0].register_forward_hook(on_first))
    yield
    for hook in hooks:
        hook.remove()


def loss_of(case: dict[str, Any], model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """One forward pass as the engine runs it: bf16 autocast, and outputs made fp32 by accelerate."""
    task = case.get("task", "sft")

    def forward(**kwargs: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(**kwargs)

    run = convert_outputs_to_fp32(forward)
    if task == "dpo":
        return dpo_loss(model, run, ids)
    if task == "grpo":
        return grpo_loss(case, run, ids)
    result = run(input_ids=ids, labels=ids, use_cache=False)
    return result if isinstance(result, torch.Tensor) else result.loss


def change_loss(kind: str, inner: Any) -> None:
    """Liger replaces the forward pass while training and leaves evaluation as it is."""
    if kind == "chunked":
        inner.loss_function = lambda logits, labels, **_: chunked_loss(logits, labels)
    if kind == "fused":
        plain = inner.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not inner.training:
                return plain(*args, **kwargs)
            hidden = inner.model(input_ids=kwargs["input_ids"], use_cache=False).last_hidden_state
            return FusedLoss.apply(hidden.reshape(-1, hidden.size(-1)).bfloat16(), inner.lm_head.weight)

        inner.forward = forward


def dpo_loss(model: nn.Module, run: Any, ids: torch.Tensor) -> torch.Tensor:
    """TRL's order: the policy's pass, then the reference's with the adapters off."""
    from trl.trainer.utils import selective_log_softmax

    outputs = run(input_ids=ids, use_cache=False)
    labels = ids[..., 1:]
    policy = selective_log_softmax(outputs.logits[..., :-1, :], labels).sum(1)
    # The reference pass runs while `outputs` is still held.
    with (
        torch.no_grad(),
        model.disable_adapter() if hasattr(model, "disable_adapter") else contextlib.nullcontext(),
    ):
        was = model.training
        model.train(False)
        reference = run(input_ids=ids, use_cache=False)
        model.train(was)
        ref = selective_log_softmax(reference.logits[..., :-1, :], labels).sum(1)
    ratio = policy - ref
    chosen, rejected = ratio.chunk(2, dim=0)
    result = -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean()
    del outputs, reference
    return result


def grpo_loss(case: dict[str, Any], run: Any, ids: torch.Tensor) -> torch.Tensor:
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    keep = case["completion"]
    logits = run(input_ids=ids, use_cache=False, logits_to_keep=keep + 1).logits[:, :-1, :] / 0.9
    logps = selective_log_softmax(logits, ids[:, -keep:])
    with torch.no_grad():
        entropy = entropy_from_logits(logits)
    del logits
    return (torch.exp(logps - logps.detach())).mean() + 0 * entropy.mean()


def count_resizes(live: Live) -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group

    def alloc(tensor: torch.Tensor) -> None:
        size = tensor.numel() * tensor.itemsize
        if tensor.untyped_storage().size() != size:
            live.resize(tensor, size)

    def free(tensor: torch.Tensor) -> None:
        if tensor.untyped_storage().size() != 0:
            live.resize(tensor, 0)

    _fsdp_param.alloc_storage = _fsdp_param_group.alloc_storage = alloc
    _fsdp_param.free_storage = free


def shard(model: nn.Module, live: Live, mesh: Any) -> None:
    """Wrap as Axolotl does for FSDP2: adapters in groups of their own, then layers, then the rest."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    count_resizes(live)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    inner = decoder(model)
    for layer in inner.model.layers:
        for module in layer.modules():
            if hasattr(module, "lora_A") and module is not layer:
                for name in module.active_adapters:
                    fully_shard(module.lora_A[name], mesh=mesh, mp_policy=policy)
                    fully_shard(module.lora_B[name], mesh=mesh, mp_policy=policy)
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def fake_mesh(ranks: int) -> Any:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    return init_device_mesh("cpu", (ranks,))


def run_case(case: dict[str, Any], layers: int) -> dict[str, int]:
    torch.manual_seed(0)
    model = build(case, layers)
    use_fast_scan(model)
    peaks: dict[str, int] = {}
    mesh = fake_mesh(case["shards"]) if case.get("shards", 1) > 1 else None
    with FakeTensorMode(allow_non_fake_inputs=True):
        live = Live()
        with live:
            materialise(model)
            if mesh is not None:
                shard(model, live, mesh)
            change_loss(case["loss"], decoder(model))
            model.train()
            if case["checkpointing"]:
                model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
                if case["method"] != "full":
                    decoder(model).enable_input_require_grads()
            optimizer = optimizer_of(case, model)
            for parameter in optimizer.param_groups[0]["params"]:
                parameter.grad = torch.empty_like(parameter)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            peaks["states"] = live.now
            sequences = case["micro"] * (2 if case.get("task") == "dpo" else 1)
            ids = torch.zeros((sequences, case["length"]), dtype=torch.long)
            if case.get("accumulate"):
                for parameter in optimizer.param_groups[0]["params"]:
                    parameter.grad = torch.empty_like(parameter)
            live.mark()
            with moments(decoder(model), live, peaks):
                loss = loss_of(case, model, ids)
                peaks["forward"] = live.mark()
                peaks["saved"] = live.now
                loss.backward()
            peaks["bottom"] = live.mark()
            del loss
            peaks["gradients"] = live.now
            optimizer.step()
            peaks["optimizer"] = live.mark()
            optimizer.zero_grad(set_to_none=True)
            if case.get("evaluate"):
                model.eval()
                live.mark()
                ids = torch.zeros((case["evaluate"], case["length"]), dtype=torch.long)
                plain = {**case, "task": "sft", "loss": "full"}
                with torch.no_grad():
                    loss_of(plain, model, ids)
                peaks["evaluation"] = live.mark()
    return peaks


def measure(case: dict[str, Any]) -> dict[str, Any]:
    started = time.monotonic()
    depth = case["shape"]["layers"]
    if case.get("whole"):
        peaks = run_case(case, depth)
    else:
        few = 3 if case.get("shards", 1) > 1 else 2  # FSDP prefetches: a last, a first and one between
        low, high = run_case(case, few), run_case(case, few + 2)
        peaks = {name: round(low[name] + (high[name] - low[name]) / 2 * (depth - few)) for name in low}
    return {"case": case, "peaks": peaks, "seconds": round(time.monotonic() - started, 2)}


def main() -> None:
    cases = json.load(sys.stdin)
    for case in cases:
        sys.stdout.write(json.dumps(measure(case)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
