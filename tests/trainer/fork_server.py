"""Imports the training stack once and forks for every program: seconds instead of half a minute each.

    python -m tests.trainer.fork_server

A line on stdin asks for a program (JSON: command, env, cwd, log, patch), a line on stdout answers with its
pid, and another one with its exit code when it has ended. `patch` names a function of
`tests.trainer.faults`, or of another module by its whole name, that is called first. Programs are run as
their `__main__` would be, in a session of their own; nothing but the cost of the imports differs from a
process started anew.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import select
import sys
import traceback
from typing import Any

from trainer.inputs.model_loading import block_imports

#: What can be asked for by its module, and what is called there with the arguments.
PROGRAMS = {
    "axolotl.cli.train": "do_cli",
    "trainer.runner.prepare": "main",
    "trainer.pictures.train": "main",
    "tests.trainer.native.rank": "main",
    "tests.trainer.sharding": "main",
    "tests.trainer.axolotl_engine": "main",
    "benchmarks.text_rules.peer": "main",
}
#: What every fork would import. The small environment for the native engine has no Axolotl.
IMPORTED = (
    "peft",
    "torch.distributed.fsdp",
    "transformers.models.llama.modeling_llama",
    "trainer.native.train",
    "trainer.pictures.train",
    "trainer.runner.prepare",
)
AXOLOTL = (
    "axolotl.cli.train",
    "axolotl.core.builders",
    "axolotl.train",
    "trainer.axolotl.plugin",
    "trainer.axolotl.trainers",
)


def _run(command: list[str]) -> int:
    """The part of the command after `-m`; a launcher for one process adds nothing that is needed here."""
    module = max(at for at, word in enumerate(command) if word == "-m")
    name, arguments = command[module + 1], command[module + 2 :]
    if name == "trainer.native":
        importlib.import_module("trainer.native.train").main()
        return 0
    return int(getattr(importlib.import_module(name), PROGRAMS[name])(*arguments) or 0)


def _become(ask: dict[str, Any]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(ask["env"])
    os.chdir(ask["cwd"])
    log = os.open(ask["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    sys.argv = ["program"]
    sys.path[:0] = [part for part in ask["env"].get("PYTHONPATH", "").split(os.pathsep) if part]
    code = 1
    try:
        for patch in ask["patch"].split():
            name, *arguments = patch.split(":")
            module, _, function = name.rpartition(".")
            module = module or "tests.trainer.faults"
            getattr(importlib.import_module(module), function)(*arguments)
        code = _run(ask["command"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        traceback.print_exc()
    os._exit(code)


def _say(**words: Any) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def import_stack() -> None:
    there = importlib.util.find_spec("axolotl") is not None
    block_imports("trackio", "sklearn")
    for name in (*(AXOLOTL if there else ()), *IMPORTED):
        importlib.import_module(name)


def main() -> None:
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w")
    import_stack()
    gc.freeze()  # every fork would go through all of it whenever it collects garbage
    _say(ready=True)
    children: set[int] = set()
    open_ = True
    while open_ or children:
        ready, _, _ = select.select([sys.stdin] if open_ else [], [], [], 0.02)
        if ready:
            line = sys.stdin.readline()
            open_ = bool(line)
            if line:
                child = os.fork()
                if child == 0:
                    _become(json.loads(line))
                children.add(child)
                _say(pid=child)
        for child in list(children):
            with contextlib.suppress(ChildProcessError):
                done, status = os.waitpid(child, os.WNOHANG)
                if done:
                    children.discard(child)
                    _say(ended=child, code=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
