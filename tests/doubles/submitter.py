"""Daemons of the smallest kind, which are killed while they submit a run, or kill themselves.

`python -m tests.doubles.submitter KIND DATA_DIR WHERE`, then a line of JSON for each: its key, run folder and
command, and before which step it dies (0: none). WHERE: Docker's socket, or the folder of Slurm's commands.
Everything was imported before, so each is there at once: its process number is printed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

from miner.backends.base import AttemptSpec, Backend
from tests.doubles import base_image
from tests.doubles.backend_bench import docker_bench, process_bench, slurm_bench
from tests.doubles.deaths import die_before


def main(kind: str, data_dir: str, where: str) -> None:
    if kind == "docker":
        bench = docker_bench(Path(data_dir), where, base_image.NAME)
    elif kind == "slurm":
        bench = slurm_bench(Path(data_dir), Path(where))
    else:
        bench = process_bench(Path(data_dir), sandbox=kind != "process")
    # Nobody waits for the children.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            submit(bench.backend, line)
            os._exit(0)
        print(pid, flush=True)


def submit(backend: Backend, line: str) -> None:
    order = json.loads(line)
    if order["dies"]:
        die_before(order["dies"])
    asyncio.run(backend.submit(AttemptSpec(order["key"], tuple(order["argv"]), Path(order["run_dir"]))))
    Path(order["run_dir"], "submitted").touch()


if __name__ == "__main__":
    main(*sys.argv[1:])
