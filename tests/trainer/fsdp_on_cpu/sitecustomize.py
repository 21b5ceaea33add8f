"""FSDP2 over gloo, for the tests: on PYTHONPATH, with FSDP_ON_CPU set, every Python that starts does this.

accelerate takes a training for sharded only on accelerators, though torch shards on the CPU as well. Changed
are the words of its state that say so (with FSDP_ON_CPU=bf16 also that of mixed precision, as on a GPU), and
the one place where Axolotl names a device for its mesh; all else is theirs.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

VARIABLE = "FSDP_ON_CPU"


def shard(state: Any) -> None:
    """`accelerate.state`: several processes on the CPU that have settings for FSDP are sharded by them."""
    known, plain = state.AcceleratorState, state.AcceleratorState.__init__

    def init(self: Any, *arguments: Any, fsdp_plugin: Any = None, **named: Any) -> None:
        first = not known._shared_state
        plain(self, *arguments, fsdp_plugin=fsdp_plugin, **named)
        if first and fsdp_plugin is not None and self.distributed_type == state.DistributedType.MULTI_CPU:
            self.distributed_type = state.DistributedType.FSDP
            state.PartialState._shared_state["distributed_type"] = self.distributed_type
            self.fsdp_plugin = fsdp_plugin
            if os.environ.get(VARIABLE) == "bf16":  # as on a GPU: computed with in bf16, whatever is there
                self._mixed_precision = "bf16"
                fsdp_plugin.set_mixed_precision("bf16")
            sys.stderr.write(f"FSDP{2 if self.is_fsdp2 else 1} on the CPU\n")

    known.__init__ = init


def mesh(distributed: Any) -> None:
    """`axolotl.utils.distributed`."""
    plain = distributed.build_parallelism_config

    def build(cfg: Any) -> Any:
        from accelerate.parallelism_config import ParallelismConfig

        device_mesh: Any = ParallelismConfig.build_device_mesh
        ParallelismConfig.build_device_mesh = lambda self, device: device_mesh(self, "cpu")
        try:
            return plain(cfg)
        finally:
            ParallelismConfig.build_device_mesh = device_mesh

    distributed.build_parallelism_config = build


class After(importlib.abc.MetaPathFinder):
    """Changes modules when they have been imported."""

    def __init__(self, changes: dict[str, Callable[[Any], None]]) -> None:
        self._changes = changes

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        change = self._changes.pop(name, None)
        if change is None or (spec := importlib.util.find_spec(name)) is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def loaded(module: ModuleType) -> None:
            load(module)
            change(module)

        spec.loader.exec_module = loaded  # type: ignore[method-assign]
        return spec


if os.environ.get(VARIABLE):
    sys.meta_path.insert(0, After({"accelerate.state": shard, "axolotl.utils.distributed": mesh}))
