"""Print the argument tables of sd-scripts' network trainers, as JSON.

    python scripts/engine_tables/kohya_table.py CHECKOUT > core/recipes/kohya/table.json

CHECKOUT is a folder with kohya-ss/sd-scripts at the commit of the images. The real `setup_parser` of each
trainer is run, so that conditions and inherited arguments are right; imports that are not installed here
(torch, diffusers, OpenCV and so on, which do not affect the arguments) are replaced by empty stand-ins.
Reading the source for `add_argument` calls was tried first: half of the calls depend on the caller's flags.
"""

import argparse
import ast
import importlib
import importlib.abc
import importlib.machinery
import pathlib
import sys
import types

from common import commit_of, one_key_per_line

TRAINERS = {"sdxl": "sdxl_train_network", "flux": "flux_train_network"}

#: Not a key of a configuration.
NOT_KEYS = {"help"}


class _Anything(type):
    """A class whose attributes are all such classes: enough to import modules that use torch."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(name)

    def __or__(cls, other: object) -> type:
        return cls

    __ror__ = __or__


def stand_in(name: str) -> type:
    def create(cls: type, *args: object, **kwargs: object) -> object:
        # As a decorator it must return what it decorates.
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return object.__new__(cls)

    body = {
        "__new__": create,
        "__init__": lambda self, *args, **kwargs: None,
        "__call__": lambda self, *args, **kwargs: args[0] if args else None,
        "__getattr__": lambda self, attribute: stand_in(attribute),
        "__class_getitem__": classmethod(lambda cls, item: cls),
    }
    return _Anything(name, (), body)


class _StandInModule(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(name)


class _StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """The last finder, so that it gets only what cannot be imported otherwise."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: object) -> types.ModuleType:
        return _StandInModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


def alternatives(action: argparse.Action) -> list:
    """The types of this argument in a TOML file, in the format of the other tables."""
    if action.nargs == 0:
        return ["bool"]
    name = getattr(action.type, "__name__", "str")
    scalar = {"int": ["int"], "float": ["float"], "int_or_float": ["float", "int"]}.get(name, ["str"])
    kinds = scalar
    if action.choices is not None and name == "str":
        kinds = [{"choices": sorted(str(choice) for choice in action.choices if choice is not None)}]
    return [{"list": kinds}] if action.nargs in ("*", "+") else kinds


def arguments(module: str) -> dict:
    parser = importlib.import_module(module).setup_parser()
    actions = [action for action in parser._actions if action.dest not in NOT_KEYS]
    return dict(sorted((action.dest, alternatives(action)) for action in actions))


def function(checkout: pathlib.Path, name: str) -> ast.FunctionDef:
    tree = ast.parse((checkout / "library" / "train_util.py").read_text("utf-8"))
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return next(node for node in functions if node.name == name)


def schedulers(checkout: pathlib.Path) -> list[str]:
    """The schedulers that `get_scheduler_fix` builds; others of transformers' enum end in a TypeError."""
    members = (
        node for node in ast.walk(function(checkout, "get_scheduler_fix")) if isinstance(node, ast.Attribute)
    )
    owners = {"SchedulerType", "DiffusersSchedulerType"}
    return sorted({node.attr.lower() for node in members if getattr(node.value, "id", "") in owners})


def optimizers(checkout: pathlib.Path) -> list[str]:
    """Every name that `get_optimizer` compares with, in lower case."""
    names = set()
    for node in ast.walk(function(checkout, "get_optimizer")):
        if isinstance(node, ast.Compare) and getattr(node.left, "id", "") == "optimizer_type":
            names |= {
                constant.value.lower()
                for side in node.comparators
                for constant in ast.walk(side)
                if isinstance(constant, ast.Constant) and isinstance(constant.value, str) and constant.value
            }
    return sorted(names)


def table(checkout: pathlib.Path) -> dict:
    sys.path.insert(0, str(checkout))
    sys.meta_path.append(_StandIns())
    return {
        "engine": "sd-scripts",
        "version": commit_of(checkout),
        "roots": TRAINERS,
        "optimizers": optimizers(checkout),
        "schedulers": schedulers(checkout),
        "objects": {module: arguments(module) for module in TRAINERS.values()},
    }


if __name__ == "__main__":
    out, sys.stdout = sys.stdout, sys.stderr
    out.write(one_key_per_line(table(pathlib.Path(sys.argv[1]).resolve())))
