"""The layers that get an adapter: every linear one that PEFT takes."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from typing import Any

from trainer.session.failures import is_oom

log = logging.getLogger(__name__)

#: Where multimodal models of transformers keep what reads text; pictures and sound go around it.
LANGUAGE, HEAD = "language_model", "lm_head"


def linear_names(model: Any) -> list[str]:
    """The linear layers' last names, as Axolotl uses them; of a vision model their full names, since its
    vision part has layers of the same last names."""
    torch = importlib.import_module("torch")
    conv1d = importlib.import_module("transformers.pytorch_utils").Conv1D
    head = model.get_output_embeddings()
    layers = [
        name
        for name, module in model.named_modules()
        if module is not head
        and not name.endswith(HEAD)
        and (isinstance(module, torch.nn.Linear | conv1d) or "Linear" in type(module).__name__)
        and "LinearScaling" not in type(module).__name__
    ]
    language = [name for name in layers if LANGUAGE in name.split(".")]
    return language if has_vision(model) else sorted({name.rpartition(".")[2] for name in layers})


def has_vision(model: Any) -> bool:
    """Return True if the language model is one of several parts."""
    config = model.config
    return getattr(config, "text_config", None) is not None and any(
        LANGUAGE in name.split(".") for name, _ in model.named_modules()
    )


def keep_what_loads(model: Any, adapter: Any) -> None:
    """Take out of an adapter's configuration the layers that PEFT refuses: a single one, as `out_proj` of
    Mamba's, would end the training with nothing. If none is left that the model has, all that load get one.
    Experts in single tensors have no layers; PEFT knows them by other names."""
    asked = adapter.target_modules
    if isinstance(asked, str) and asked != "all-linear":
        return  # a pattern of an operator's own
    modules = dict(model.named_modules())
    named = linear_names(model) if isinstance(asked, str) else sorted(asked or ())
    found = {name: module for name in named if (module := _example(modules, name)) is not None}
    refused = [name for name, module in found.items() if not _loads(model, name, module)]
    if len(refused) < len(found):
        loading = [name for name in named if name not in refused]
    elif any("experts" in path.split(".") for path in modules):
        return
    else:
        others = ((name, _example(modules, name)) for name in linear_names(model))
        loading = [name for name, module in others if module is not None and _loads(model, name, module)]
    if loading and loading != named:
        log.warning("the adapter is on %s, not on %s", ", ".join(loading), ", ".join(named) or "nothing")
        adapter.target_modules = set(loading)


def _example(modules: Mapping[str, Any], name: str) -> Any:
    """A layer of this name: PEFT matches whole names, or their ends from a dot on."""
    return next((module for path, module in modules.items() if f".{path}".endswith(f".{name}")), None)


def _loads(model: Any, name: str, module: Any) -> bool:
    """Return whether PEFT can add an adapter to such a layer, tried on one beside the model."""
    peft: Any = importlib.import_module("peft")
    place: Any = importlib.import_module("torch").nn.Module()
    last = name.rpartition(".")[2]
    place.add_module(last, module)
    place.config = model.config
    trained = [weight.requires_grad for weight in module.parameters()]
    try:
        peft.inject_adapter_in_model(peft.LoraConfig(r=1, target_modules=[last]), place)
    except (ValueError, TypeError, NotImplementedError, AttributeError, KeyError, RuntimeError) as error:
        if is_oom(error):
            raise
        log.warning("no adapter on %s: %s", name, str(error)[:300])
        return False
    finally:
        for weight, wanted in zip(module.parameters(), trained, strict=True):
            weight.requires_grad_(wanted)
    return True
