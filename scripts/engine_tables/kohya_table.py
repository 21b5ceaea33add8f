"""Print the argument tables of sd-scripts' network trainers, as JSON.

    python scripts/engine_tables/kohya_table.py CHECKOUT > core/recipes/tables/kohya.json

CHECKOUT is a folder with kohya-ss/sd-scripts at the commit the images use. The real `setup_parser` of each
trainer is run, so conditions and inherited arguments come out right; whatever it imports that is not
installed here (torch, diffusers, OpenCV and so on, none of which has a say in the arguments) is replaced
by an empty stand-in. Reading the source for `add_argument` calls instead was tried first: half of the
calls sit behind flags passed from the caller.
"""

import argparse
import ast
import importlib
import importlib.abc
import importlib.machinery
import os
import pathlib
import subprocess
import sys
import types

from compact import one_key_per_line

TRAINERS = {"sdxl": "sdxl_train_network", "flux": "flux_train_network"}

#: Read through `getattr` or by the config-file reader, so no argument of a config.
NOT_KEYS = {"help"}


class _Anything(type):
    """A class whose every attribute is another such class: enough to import modules that use torch."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(name)

    def __or__(cls, other: object) -> type:
        return cls

    __ror__ = __or__


def stand_in(name: str) -> type:
    def create(cls: type, *args: object, **kwargs: object) -> object:
        # Used as a decorator, it must hand back what it decorates.
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
    """Comes last, so that only what nobody else can import gets here."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: object) -> types.ModuleType:
        return _StandInModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


def alternatives(action: argparse.Action) -> list:
    """What a TOML file may hold for this argument, in the vocabulary of the other tables."""
    if action.nargs == 0:
        return ["bool"]
    name = getattr(action.type, "__name__", "str")
    scalar = {"int": ["int"], "float": ["float"], "int_or_float": ["float", "int"]}.get(name, ["str"])
    if action.choices is not None:
        found = [{"choices": sorted(str(one) for one in action.choices if one is not None)}]
        found = found if name == "str" else scalar
    else:
        found = scalar
    return [{"list": found}] if action.nargs in ("*", "+") else found


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
    """Every name that `get_optimizer` compares with, in lower case as it does it."""
    found = set()
    for node in ast.walk(function(checkout, "get_optimizer")):
        if isinstance(node, ast.Compare) and getattr(node.left, "id", "") == "optimizer_type":
            found |= {
                one.value.lower()
                for side in node.comparators
                for one in ast.walk(side)
                if isinstance(one, ast.Constant) and isinstance(one.value, str) and one.value
            }
    return sorted(found)


def version(checkout: pathlib.Path) -> str:
    """The commit: from git, or from ENGINE_COMMIT for an unpacked archive."""
    if "ENGINE_COMMIT" in os.environ:
        return os.environ["ENGINE_COMMIT"]
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def table(checkout: pathlib.Path) -> dict:
    sys.path.insert(0, str(checkout))
    sys.meta_path.append(_StandIns())
    return {
        "engine": "sd-scripts",
        "version": version(checkout),
        "roots": TRAINERS,
        "optimizers": optimizers(checkout),
        "schedulers": schedulers(checkout),
        "objects": {module: arguments(module) for module in TRAINERS.values()},
    }


if __name__ == "__main__":
    out, sys.stdout = sys.stdout, sys.stderr
    found = table(pathlib.Path(sys.argv[1]).resolve())
    out.write(one_key_per_line(found))
