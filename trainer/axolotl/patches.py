"""Changes to Axolotl and to its trainer object for which it has no hook.

Each function says what would go wrong without it. `apply_patches` runs once in every training process, before
anything is loaded.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from core.domain.choices import Attention
from core.models.kernels import LigerPart
from core.recipes.axolotl.recipe import LIGER_PLUGIN
from core.recipes.axolotl.rules import LORA_KERNELS
from trainer.axolotl.answer_logits import AnswerLogits, SelectiveHead
from trainer.inputs.adapter_targets import HEAD, LANGUAGE, has_vision, keep_what_loads, linear_names
from trainer.inputs.model_loading import (
    NEXT_ATTENTION,
    block_imports,
    forbid_remote_code,
    with_attention,
)
from trainer.inputs.tokens import IGNORED, forget_unknown, model_rows
from trainer.scoring.forward import PREPARED, WHOLE, scoring_mode
from trainer.session.progress_log import SpeedMeter


def apply_patches(config: Mapping[str, Any]) -> None:
    """Apply all patches; `config` is Axolotl's configuration as it was read."""
    leave_out_trackio(config)
    keep_imports_out_of_collections()
    save_few_rows_here()
    forbid_remote_code()
    fall_back_to_slower_attention()
    keep_vocabulary()
    limit_tokens_to_vocabulary()
    read_text_only()
    find_every_linear()
    shard_by_layer()


def leave_out_trackio(config: Mapping[str, Any]) -> None:
    """trl imports it wherever it is installed, and Gradio with it: 2.6 s of every start with preferences or
    rewards."""
    if not config.get("use_trackio"):
        block_imports("trackio")


def keep_imports_out_of_collections() -> None:
    """Axolotl collects garbage four to seven times before the first step, a third of a second each: most
    of that goes through the 770,000 objects of the imported packages, which stay anyway.

    In a fork nothing is collected that was there before: a worker of `datasets` once ran a destructor that
    waited for ever for a thread, which a fork does not have."""
    gc.freeze()
    os.register_at_fork(after_in_child=gc.freeze)


def save_few_rows_here() -> None:
    """Axolotl saves the rows that it has read with at least one process beside this one, which starts Python
    and imports `datasets` again: a second more of every supervised start."""
    dataset: Any = importlib.import_module("datasets").Dataset
    save = dataset.save_to_disk

    def here(self: Any, *arguments: Any, num_proc: int | None = None, **named: Any) -> None:
        save(self, *arguments, num_proc=None if num_proc == 1 else num_proc, **named)

    dataset.save_to_disk = here


def keep_vocabulary() -> None:
    """Tokenizers may know more tokens than the model has rows (that of Gemma 3 1B has one for pictures), and
    Axolotl gives some a padding token of its own. It would add rows for them: evaluation refuses such a
    model."""
    loader = importlib.import_module("axolotl.loaders.model").ModelLoader

    def keep(self: Any) -> None:
        self.model.tie_weights()

    loader._resize_token_embeddings = keep


def fall_back_to_slower_attention() -> None:
    """A kernel that the model or the machine lacks would end the training, and the next attempt as well."""
    loader = importlib.import_module("axolotl.loaders.model").ModelLoader
    load = loader._load_model_from_pretrained

    def descending(self: Any, *arguments: Any, **named: Any) -> Any:
        def with_kernel(attention: Attention) -> Any:
            if attention is not wanted:
                self.cfg.attn_implementation = attention.value
                self.model_kwargs["attn_implementation"] = attention.value
                self.model_config._attn_implementation = attention.value
            return load(self, *arguments, **named)

        named_kernel = self.model_kwargs.get("attn_implementation")
        if named_kernel not in tuple(Attention):
            return load(self, *arguments, **named)
        wanted = Attention(named_kernel)
        return with_attention(with_kernel, wanted)[0]

    loader._load_model_from_pretrained = descending


def limit_tokens_to_vocabulary() -> None:
    """Axolotl loads its own tokenizer for GRPO's prompts and completions."""
    module: Any = importlib.import_module("axolotl.loaders.tokenizer")
    auto = importlib.import_module("transformers").AutoTokenizer

    class KnownTokens:
        @staticmethod
        def from_pretrained(path: Any, **options: Any) -> Any:
            tokenizer = auto.from_pretrained(path, **options)
            if tokenizer.is_fast:
                forget_unknown(tokenizer, model_rows(str(path)))
            return tokenizer

    module.AutoTokenizer = KnownTokens


def read_text_only() -> None:
    """A vision model gets rows of text here and does not need its image processor, which not every folder
    has."""
    module: Any = importlib.import_module("axolotl.train")
    module.load_processor = lambda *_, **__: None


def find_every_linear() -> None:
    """Find all linear layers for LoRA: those of GPT-2 too, which have another class, but no layer that only
    pictures reach, and none that PEFT refuses."""
    adapter: Any = importlib.import_module("axolotl.loaders.adapter")
    adapter.find_all_linear_names = linear_names
    build = adapter._build_peft_lora_config

    def loadable(model: Any, config: Any) -> Any:
        built = build(model, config)
        keep_what_loads(model, built)
        return built

    adapter._build_peft_lora_config = loadable


def shard_by_layer() -> None:
    """Under FSDP2 every matrix of an adapter would be a part of its own: 448 more of them for an 8B model,
    each gathered in every pass. torch gathers what is frozen in bf16 and what is trained in fp32 together
    today, so an adapter goes with its layer."""
    module: Any = importlib.import_module("axolotl.monkeypatch.accelerate.fsdp2")
    is_own_part = module._process_lora_module_for_fsdp

    def with_its_layer(part: Any, settings: dict[str, Any]) -> bool:
        return False if goes_with_its_layer(part) else bool(is_own_part(part, settings))

    module._process_lora_module_for_fsdp = with_its_layer


def goes_with_its_layer(part: Any) -> bool:
    """An adapter on a plain linear layer. Quantised layers, embeddings and DoRA's magnitudes are left to
    accelerate."""
    torch = importlib.import_module("torch")
    base = getattr(part, "base_layer", None)
    weight = getattr(base, "weight", None)
    if weight is None or type(weight) is not torch.nn.Parameter or not weight.is_floating_point():
        return False
    bias = getattr(base, "bias", None)
    others = (part.lora_embedding_A, part.lora_embedding_B, part.lora_magnitude_vector)
    return bool(part.lora_A) and not any(map(len, others)) and (bias is None or bias.dtype == weight.dtype)


def freeze_vision(model: Any) -> int:
    """Freeze the weights that text never reaches: they get no gradients, for which several processes would
    wait. Returns how many."""
    if not has_vision(model):
        return 0
    beyond = [
        weight
        for name, weight in model.named_parameters()
        if weight.requires_grad and LANGUAGE not in name.split(".") and HEAD not in name
    ]
    for weight in beyond:
        weight.requires_grad_(False)
    return len(beyond)


#: Positions at a time: the full vocabulary in fp32, twice, for each of them.
KL_CHUNK = 1024


def mean_kl(model_logits: Any, base_logits: Any) -> Any:
    """The mean over positions of KL(model || base), differentiable in the model's."""
    chunks = zip(model_logits.split(KL_CHUNK), base_logits.split(KL_CHUNK), strict=True)
    return sum(_summed_kl(own, others) for own, others in chunks) / max(len(model_logits), 1)


def _summed_kl(model_logits: Any, base: Any) -> Any:
    log_p = model_logits.float().log_softmax(-1)
    log_q = base.float().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum()


def count_tokens(trainer: Any, meter: SpeedMeter) -> None:
    """Count the tokens that are trained on, and the time spent waiting for batches."""
    step, fetch = trainer.training_step, trainer.get_batch_samples

    def counted(model: Any, inputs: Any, *rest: Any, **named: Any) -> Any:
        meter.tokens += tokens_in(inputs)
        return step(model, inputs, *rest, **named)

    def timed(*arguments: Any, **named: Any) -> Any:
        began = time.monotonic()
        samples = fetch(*arguments, **named)
        meter.waited += time.monotonic() - began
        return samples

    trainer.training_step, trainer.get_batch_samples = counted, timed


def tokens_in(inputs: Any) -> int:
    """Tokens of a batch with its padding, which is computed like everything else."""
    if not isinstance(inputs, Mapping):
        return 0
    return sum(value.numel() for key, value in inputs.items() if key.endswith("input_ids"))


def add_kl(
    trainer: Any,
    coefficient: float,
    base: Any,
    share_of_labels: Callable[[Any], Any],
    answers: AnswerLogits | None = None,
) -> None:
    """Train with loss + coefficient · KL to the base model, as the task is scored. Without a `base`, the
    model itself with its adapter switched off is the base. `share_of_labels`: the share of its step's labels
    that a split micro-batch has. `answers` leaves other logits out."""
    plain = trainer.compute_loss
    if answers is not None:
        answers.at_labels = True
        head = answers.head if base is None else SelectiveHead(base)

    def with_kl(model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        loss, outputs = plain(model, dict(inputs), return_outputs=True, num_items_in_batch=num_items_in_batch)
        if not model.training:
            return (loss, outputs) if return_outputs else loss
        labels = inputs["labels"]
        unlabelled = {key: value for key, value in inputs.items() if key != "labels"}
        if answers is None or answers.labels is None:
            learned = labels != IGNORED
            own, others = outputs["logits"][learned], _base_logits(trainer, base, unlabelled)[learned]
        else:
            places, rows = answers.labels
            own = outputs["logits"][0, rows]
            with head.at(labels.shape, places):
                others = head.logits_at(_base_logits(trainer, base, unlabelled))
        kl = mean_kl(own, others) * share_of_labels(labels)
        loss = loss + coefficient * kl / _share(trainer, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss

    trainer.compute_loss = with_kl


def _share(trainer: Any, num_items_in_batch: Any) -> float:
    """Return the weight of a micro-batch's KL: if the engine sums the losses of a step's micro-batches
    instead of averaging them, so must this."""
    if trainer.model_accepts_loss_kwargs and num_items_in_batch is not None:
        return float(trainer.current_gradient_accumulation_steps)
    return 1.0


def _base_logits(trainer: Any, base: Any, inputs: dict[str, Any]) -> Any:
    """Compute the base's logits as the evaluation does: without dropout and noise. With a cache, packed rows
    would see each other."""
    import torch

    with torch.no_grad():
        if base is not None:
            return base(**inputs, use_cache=False).logits
        model = trainer.accelerator.unwrap_model(trainer.model)
        with model.disable_adapter():
            try:
                return model.eval()(**inputs, use_cache=False).logits
            finally:
                model.train()


def patch_generate(
    model: Any, share: float, reshard: bool, generating: Callable[[], AbstractContextManager[None]]
) -> None:
    """From now on, for the engine and for our evaluation. `share`: the share of the layers that a GPU has
    room for; `reshard`: the plan's setting for forward passes, restored after each generation."""
    inner = getattr(model, "_orig_mod", model)
    if hasattr(inner, PREPARED):
        return
    if inner is not model:
        # Compiled, it is no part of FSDP's to whoever registers generating with it: the engine does in vain.
        from torch.distributed.fsdp import register_fsdp_forward_method

        register_fsdp_forward_method(inner, "generate")
    plain = inner.generate
    parts = kept_parts(inner, share)
    # With every weight there, no rank waits for another one's tokens.
    alone = {"synced_gpus": False} if parts and share >= 1 else {}

    @contextmanager
    def prepared() -> Iterator[None]:
        with generating(), gathered(parts, reshard) if parts else nullcontext():
            yield

    @functools.wraps(plain)
    def generate(*arguments: Any, **named: Any) -> Any:
        with prepared():
            return plain(*arguments, **{**named, **alone})

    inner.generate = generate
    setattr(inner, PREPARED, prepared)
    setattr(inner, WHOLE, bool(alone))


def kept_parts(model: Any, share: float) -> list[Any]:
    """The parts to keep gathered: all, or the root, which every pass needs from its first to its last layer,
    and so many layers of those that read text, each with all that is a part of its own inside it."""
    if not share or share >= 1:
        return sharded_parts(model) if share else []
    from torch.distributed.fsdp import FSDPModule

    parts = {name: part for name, part in model.named_modules() if isinstance(part, FSDPModule)}
    layers: list[str] = []
    for name in parts:
        if name and not (layers and name.startswith(f"{layers[-1]}.")):
            layers.append(name)
    layers = [name for name in layers if LANGUAGE in name.split(".")] or layers
    # A norm after the last layer may be a part too: no layer more for that.
    kept = layers[: int(share * len(layers) + 1e-6)]
    inside = tuple(f"{name}." for name in kept)
    return [part for name, part in parts.items() if not name or name in kept or name.startswith(inside)]


@contextmanager
def gathered(parts: list[Any], reshard: bool) -> Iterator[None]:
    """Keep these parts gathered from their first pass until the end of the block."""
    try:
        for part in parts:
            part.set_reshard_after_forward(False, recurse=False)
        yield
    finally:
        for part in parts:
            part.set_reshard_after_forward(reshard, recurse=False)
            part.reshard()


def run_first_pass(model: Any) -> None:
    """FSDP2 sees at the first pass which weights are trained, and reduces their gradients accordingly ever
    after. Ours may have the adapter switched off, to score the base: in bf16 the first backward pass then
    ends in gradients of the wrong kind. So the first pass is one of the model as it is trained."""
    import torch

    if sharded_parts(model):
        with scoring_mode(model):
            model(input_ids=torch.zeros((1, 2), dtype=torch.long, device=next(model.parameters()).device))


def sharded_parts(model: Any) -> list[Any]:
    from torch.distributed.fsdp import FSDPModule

    return [part for part in model.modules() if isinstance(part, FSDPModule)]


Note = Callable[[str, str], None]


def leave_out_what_fails(config: MutableMapping[str, Any], note: Note) -> None:
    """Leave out kernels that cannot be loaded, so that the training goes on without them; what fails in a
    step is met by the next attempt (`core.runs.kernel_failures`). `config` is Axolotl's configuration as it
    was read, `note` tells the operator."""
    use_installed_attention(config)
    if LIGER_PLUGIN in (config.get("plugins") or []):
        do_without_liger(note)
    if any(config.get(key) for key in LORA_KERNELS):
        do_without_lora_kernels(note)


def use_installed_attention(config: MutableMapping[str, Any]) -> None:
    """Axolotl refuses a configuration with flash attention where a GPU is visible and the package is not
    there, before any model is loaded. What is used in the end is noted when it is."""
    named = config.get("attn_implementation")
    while named in _INSTALLED and not _INSTALLED[named]():
        named = NEXT_ATTENTION[Attention(named)].value
        config["attn_implementation"] = named


def _flash_2_is_there() -> bool:
    utils: Any = importlib.import_module("transformers.utils")
    hub: Any = importlib.import_module("axolotl.monkeypatch.attention.fa2_hub_kernel")
    return not _cuda() or utils.is_flash_attn_2_available() or hub.is_fa2_hub_kernel_available()


def _flash_3_is_there() -> bool:
    utils: Any = importlib.import_module("transformers.utils")
    return not _cuda() or utils.is_flash_attn_3_available(kernels_fallback_ok=True)


def _cuda() -> bool:
    return bool(importlib.import_module("torch").cuda.is_available())


_INSTALLED: dict[str, Callable[[], bool]] = {
    Attention.FLASH_2.value: _flash_2_is_there,
    Attention.FLASH_3.value: _flash_3_is_there,
}


def do_without_liger(note: Note) -> None:
    """Its plugin imports Liger, Triton and the model's code, and Liger refuses some parts of some models."""
    plugin: Any = importlib.import_module("axolotl.integrations.liger.plugin").LigerPlugin
    load = plugin.pre_model_load

    def attempt(self: Any, cfg: Any) -> None:
        try:
            load(self, cfg)
        except Exception as error:  # noqa: BLE001 - whatever it is, transformers' own code remains
            note("liger", f"left out: {type(error).__name__}: {str(error)[:200]}")
            in_chunks = cfg[LigerPart.LOSS.value]
            for part in LigerPart:
                cfg[part.value] = False
            if in_chunks:
                importlib.import_module("axolotl.monkeypatch.loss.chunked").patch_chunked_ce_loss_fn()

    plugin.pre_model_load = attempt


def do_without_lora_kernels(note: Note) -> None:
    """Axolotl rewrites the source of the model's attention layer, and stops where it does not find what it
    knows."""
    manager: Any = importlib.import_module("axolotl.loaders.patch_manager").PatchManager
    rewrite, apply = manager._apply_self_attention_lora_patch, manager._apply_lora_kernel_patch
    #: The layer's class, and its own code.
    rewritten: list[tuple[Any, Any]] = []

    def leave_out(cfg: Any, error: Exception) -> None:
        note("lora_kernels", f"left out: {type(error).__name__}: {str(error)[:200]}")
        for key in LORA_KERNELS:
            cfg[key] = False
        for layer, forward in rewritten:
            layer.forward = forward

    def attempt_rewrite(self: Any) -> None:
        try:
            if self.cfg.lora_qkv_kernel or self.cfg.lora_o_kernel:
                layer = _attention_layer(self.cfg)
                rewritten.append((layer, layer.forward))
            rewrite(self)
        except Exception as error:  # noqa: BLE001 - whatever it is, peft's own code remains
            leave_out(self.cfg, error)

    def attempt_apply(self: Any, model: Any) -> None:
        try:
            apply(self, model)
        except Exception as error:  # noqa: BLE001 - likewise
            leave_out(self.cfg, error)

    manager._apply_self_attention_lora_patch = attempt_rewrite
    manager._apply_lora_kernel_patch = attempt_apply


def _attention_layer(cfg: Any) -> Any:
    module: Any = importlib.import_module("axolotl.monkeypatch.lora_kernels")
    return module.get_attention_cls_from_config(cfg)
