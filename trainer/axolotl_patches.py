"""What Axolotl does to a model before it trains, and evaluation would not follow; and what makes it start
late. It has no hooks for these; each function says what would go wrong without it. Applied once in every
training process, before anything is loaded.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Mapping
from typing import Any

from core.choices import Attention
from trainer.inputs.tokens import forget_unknown, model_rows
from trainer.loading import forbid_code, leave_out, with_attention

#: Where multimodal models of transformers keep what reads text; pictures and sound go around it.
LANGUAGE, HEAD = "language_model", "lm_head"


def apply(config: Mapping[str, Any]) -> None:
    """`config` is Axolotl's, as it was read."""
    leave_out_trackio(config)
    keep_imports_out_of_collections()
    save_few_rows_here()
    forbid_code()
    fall_back_to_slower_attention()
    keep_vocabulary()
    read_what_the_model_knows()
    read_text_only()
    find_every_linear()
    shard_by_layer()


def leave_out_trackio(config: Mapping[str, Any]) -> None:
    """trl imports it wherever it is installed, and Gradio with it: 2.6 s of every start with preferences or
    rewards."""
    if not config.get("use_trackio"):
        leave_out("trackio")


def keep_imports_out_of_collections() -> None:
    """Axolotl collects garbage four to seven times before the first step, a third of a second each: most
    of that goes through the 770,000 objects of the imported packages, which stay anyway."""
    gc.freeze()


def save_few_rows_here() -> None:
    """Axolotl saves the rows that it has read with at least one process beside this one, which starts Python
    and imports `datasets` anew: a second more of every supervised start."""
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
    """A kernel that the model or the machine lacks would end the training, and the next attempt with it."""
    loader = importlib.import_module("axolotl.loaders.model").ModelLoader
    load = loader._load_model_from_pretrained

    def descending(self: Any, *arguments: Any, **named: Any) -> Any:
        def with_kernel(attention: Attention) -> Any:
            if attention is not wanted:
                self.cfg.attn_implementation = attention.value
                self.model_kwargs["attn_implementation"] = attention.value
                self.model_config._attn_implementation = attention.value
            return load(self, *arguments, **named)

        asked = self.model_kwargs.get("attn_implementation")
        if asked not in tuple(Attention):
            return load(self, *arguments, **named)
        wanted = Attention(asked)
        return with_attention(with_kernel, wanted)[0]

    loader._load_model_from_pretrained = descending


def read_what_the_model_knows() -> None:
    """Axolotl encodes GRPO's prompts, and the rest of what is generated, with a tokenizer of its own."""
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
    """A model that also sees gets rows of text here, and needs none of its picture processor, which not every
    folder holds."""
    module: Any = importlib.import_module("axolotl.train")
    module.load_processor = lambda *_, **__: None


def find_every_linear() -> None:
    """For LoRA on all linear layers: those of GPT-2 too, which are called something else, but no layer that
    only pictures reach."""
    adapter: Any = importlib.import_module("axolotl.loaders.adapter")
    adapter.find_all_linear_names = linear_names


def linear_names(model: Any) -> list[str]:
    """Their last names, as Axolotl has them; of a model that also sees their whole names, since its eyes have
    layers of the same last names."""
    torch = importlib.import_module("torch")
    conv1d = importlib.import_module("transformers.pytorch_utils").Conv1D
    head = model.get_output_embeddings()
    found = [
        name
        for name, module in model.named_modules()
        if module is not head
        and not name.endswith(HEAD)
        and (isinstance(module, torch.nn.Linear | conv1d) or "Linear" in type(module).__name__)
        and "LinearScaling" not in type(module).__name__
    ]
    language = [name for name in found if LANGUAGE in name.split(".")]
    return language if _also_sees(model) else sorted({name.rpartition(".")[2] for name in found})


def shard_by_layer() -> None:
    """Under FSDP2 every matrix of an adapter would be a part of its own: 448 more of them for an 8B model,
    each gathered in every pass. torch gathers what is frozen in bf16 and what is trained in fp32 together
    today, so an adapter goes with its layer."""
    module: Any = importlib.import_module("axolotl.monkeypatch.accelerate.fsdp2")
    apart = module._process_lora_module_for_fsdp

    def with_its_layer(part: Any, how: dict[str, Any]) -> bool:
        return False if goes_with_its_layer(part) else bool(apart(part, how))

    module._process_lora_module_for_fsdp = with_its_layer


def goes_with_its_layer(part: Any) -> bool:
    """A linear layer's, on plain numbers. Quantised ones are left to who knows them, and so are those of
    embeddings and with magnitudes."""
    torch = importlib.import_module("torch")
    base = getattr(part, "base_layer", None)
    weight = getattr(base, "weight", None)
    if weight is None or type(weight) is not torch.nn.Parameter or not weight.is_floating_point():
        return False
    bias = getattr(base, "bias", None)
    others = (part.lora_embedding_A, part.lora_embedding_B, part.lora_magnitude_vector)
    return bool(part.lora_A) and not any(map(len, others)) and (bias is None or bias.dtype == weight.dtype)


def freeze_senses(model: Any) -> int:
    """Weights that text never reaches get no gradients, which several processes would wait for. How many."""
    if not _also_sees(model):
        return 0
    beyond = [
        weight
        for name, weight in model.named_parameters()
        if weight.requires_grad and LANGUAGE not in name.split(".") and HEAD not in name
    ]
    for weight in beyond:
        weight.requires_grad_(False)
    return len(beyond)


def _also_sees(model: Any) -> bool:
    """A language model among other parts."""
    config = model.config
    return getattr(config, "text_config", None) is not None and any(
        LANGUAGE in name.split(".") for name, _ in model.named_modules()
    )
