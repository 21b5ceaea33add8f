"""Print the key and type table of the installed Axolotl, as JSON.

Run it with the training environment's python, never with the daemon's:

    TRAINING_PYTHON scripts/engine_tables/axolotl_table.py > core/recipes/axolotl/table.json

`core.recipes.render` checks against the table on a machine without Axolotl. It is read from the pydantic
models' annotations and not from their JSON schema, because some fields have torch dtypes, which a JSON
schema cannot express. Field types only: Axolotl's cross-field checks stay in Axolotl.
"""

import enum
import importlib.metadata
import inspect
import json
import logging
import sys
import types
import typing

from common import one_key_per_line
from pydantic import BaseModel, ValidationError

#: The names of scalar types in the table. Composite alternatives are `{"list": [...]}`,
#: `{"dict": [...]}`, `{"object": name}` and `{"choices": [...]}`.
SCALARS = {int: "int", float: "float", bool: "bool", str: "str", type(None): "null"}

#: Optional parts of the engine that have keys of their own, valid only if the config lists them.
PLUGINS = {
    "axolotl.integrations.liger.LigerPlugin": ("axolotl.integrations.liger.args", "LigerArgs"),
    "axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin": (
        "axolotl.integrations.cut_cross_entropy.args",
        "CutCrossEntropyArgs",
    ),
}

#: Dropped from the merged schema by the engine itself, so not keys of a config.
INTERNAL = {"capabilities", "env_capabilities"}

#: Handled in the trainer, outside the transformers enum of schedulers.
OWN_SCHEDULERS = {
    "one_cycle": ["anneal_strategy", "div_factor", "final_div_factor", "pct_start", "three_phase"],
    "rex": [],
}
SET_BY_THE_TRAINER = {"optimizer", "num_warmup_steps", "num_training_steps", "last_epoch"}


class Reader:
    """Walks annotations and collects every pydantic model as an object of the table."""

    def __init__(self) -> None:
        self.objects: dict[str, dict] = {}

    def object_name(self, model: type[BaseModel]) -> str:
        name = model.__name__
        if name not in self.objects:
            self.objects[name] = {}  # before the fields, so that a recursive model ends
            self.objects[name] = self.fields(model)
        return name

    def fields(self, model: type[BaseModel]) -> dict:
        result = {}
        for name, field in model.model_fields.items():
            if name in INTERNAL:
                continue
            alternatives = self.alternatives(field.annotation)
            for key in {name, *aliases(field)}:
                result[key] = alternatives
        return dict(sorted(result.items()))

    def alternatives(self, annotation: object) -> list:
        return sorted(unique(self._walk(annotation)), key=lambda item: json.dumps(item))

    def _walk(self, annotation: object) -> list:
        origin, args = typing.get_origin(annotation), typing.get_args(annotation)
        if origin is typing.Annotated:
            return self._walk(args[0])
        if origin in (typing.Union, types.UnionType):
            return merged_choices([item for arg in args for item in self._walk(arg)])
        if origin is typing.Literal:
            return [{"choices": sorted(args, key=str)}]
        if origin in (list, tuple, set) or annotation in (list, tuple, set):
            return [{"list": self.alternatives(args[0]) if args else ["any"]}]
        if origin is dict or annotation is dict:
            return [{"dict": self.alternatives(args[1]) if args else ["any"]}]
        if annotation in SCALARS:
            return [SCALARS[annotation]]
        if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
            return [
                {"choices": sorted(str(item.value) for item in annotation if isinstance(item.value, str))}
            ]
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return [{"object": self.object_name(annotation)}]
        return ["any"]


def aliases(field: object) -> list[str]:
    result = [field.alias] if isinstance(field.alias, str) else []
    validation = field.validation_alias
    return result + [item for item in getattr(validation, "choices", []) if isinstance(item, str)]


def merged_choices(alternatives: list) -> list:
    """`Literal[...] | SomeEnum` is one set of choices."""
    choices = [item["choices"] for item in alternatives if isinstance(item, dict) and "choices" in item]
    rest = [item for item in alternatives if not (isinstance(item, dict) and "choices" in item)]
    if choices:
        rest.append({"choices": sorted({value for group in choices for value in group}, key=str)})
    return rest


def unique(values: list) -> list:
    return [value for place, value in enumerate(values) if value not in values[:place]]


def optimizers() -> list[str]:
    from axolotl.utils.schemas.enums import CustomSupportedOptimizers
    from transformers.training_args import OptimizerNames

    return sorted({item.value for item in (*OptimizerNames, *CustomSupportedOptimizers)})


def schedulers() -> dict[str, list[str]]:
    """Each scheduler and the `lr_scheduler_kwargs` it takes; any other is a TypeError after loading."""
    from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION
    from transformers.trainer_utils import SchedulerType

    result = {item.value: extra_arguments(TYPE_TO_SCHEDULER_FUNCTION[item]) for item in SchedulerType}
    return dict(sorted((result | OWN_SCHEDULERS).items()))


def extra_arguments(function: typing.Callable) -> list[str]:
    """The function's own arguments; `*` if it takes any."""
    parameters = inspect.signature(function).parameters
    open_ended = ["*"] if any(item.kind is item.VAR_KEYWORD for item in parameters.values()) else []
    named = {name for name, item in parameters.items() if item.kind is not item.VAR_KEYWORD}
    return open_ended + sorted(named - SET_BY_THE_TRAINER)


def attention(model: type[BaseModel], names: frozenset[str]) -> dict[str, bool]:
    """Each attention the schema accepts, and whether it keeps packed rows apart.

    Otherwise a packed row attends to its neighbours, and Axolotl only warns.
    """
    result = {}
    for name in sorted(names):
        try:
            config = model(
                base_model="any", learning_rate=1e-4, datasets=[{"path": "any"}], attn_implementation=name
            )
        except ValidationError:
            continue  # in the enum, but refused with the libraries of this release
        result[name] = config.attn_decontaminates_packing
    return result


def table() -> dict:
    from axolotl.utils.schemas.config import AxolotlInputConfig
    from axolotl.utils.schemas.deprecated import DeprecatedParameters
    from axolotl.utils.schemas.enums import CANONICAL_ATTN_IMPLS, LEGACY_ATTN_FLAG_TO_IMPL, ChatTemplate

    reader = Reader()
    root = reader.object_name(AxolotlInputConfig)
    plugins = {
        plugin: reader.object_name(getattr(__import__(module, fromlist=[name]), name))
        for plugin, (module, name) in PLUGINS.items()
    }
    packages = ("axolotl", "transformers", "trl", "peft", "accelerate")
    return {
        "engine": "axolotl",
        "version": importlib.metadata.version("axolotl"),
        "made_with": {name: importlib.metadata.version(name) for name in packages},
        "root": root,
        "plugins": plugins,
        "optimizers": optimizers(),
        "schedulers": schedulers(),
        "attention": attention(AxolotlInputConfig, CANONICAL_ATTN_IMPLS),
        "attention_flags": dict(sorted(LEGACY_ATTN_FLAG_TO_IMPL.items())),
        "chat_templates": sorted(item.value for item in ChatTemplate),
        "required": sorted(
            name for name, field in AxolotlInputConfig.model_fields.items() if field.is_required()
        ),
        "deprecated": sorted(DeprecatedParameters.model_fields),
        "objects": dict(sorted(reader.objects.items())),
    }


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    out, sys.stdout = sys.stdout, sys.stderr  # imports of the engine print a banner
    text = one_key_per_line(table())
    out.write(text)
