"""Measure how fast the GPUs here add up their gradients: python -m trainer.runner.check_links

One process per GPU, started as a training's; two CPU processes where there is no GPU. Prints one JSON object
with what was measured, or with the `problem`. The doctor runs it as a training.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

from core.system.wrapper import adopt_orphans
from trainer.runner.processes import free_port, kill_descendants

#: Importing torch in several processes from a cold disk takes most of it.
LIMIT_S = 120.0
#: A GPU that the others wait for longer is not coming.
JOIN_S = 60.0
#: Large enough for the full rate of a link; on a CPU it is only to work.
GPU_BYTES, CPU_BYTES = 256 * 2**20, 2**20
WARM_UP, ROUNDS = 3, 10
#: Lines of the processes' output that are shown when they failed.
LAST_LINES = 12


def main(limit_s: float = LIMIT_S) -> int:
    if "RANK" in os.environ:
        measure()
        return 0
    adopt_orphans()  # so that what a killed launcher leaves behind can be killed
    sys.stdout.write(f"{json.dumps(measured_apart(limit_s))}\n")
    return 0


def measured_apart(limit_s: float = LIMIT_S) -> dict[str, Any]:
    """Start the processes and return what the first one measured, or the problem."""
    import torch

    processes = torch.cuda.device_count() if torch.cuda.is_available() else 2
    if processes < 2:
        return {"problem": "only one GPU can be seen by a training", "output": ""}
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", str(processes))
    # As in trainings: a container without a network can not resolve its own name.
    address = ("--local-addr", "127.0.0.1", "--master-addr", "127.0.0.1", "--master-port", str(free_port()))
    env = {**os.environ, "NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "1"}
    if not torch.cuda.is_available():
        env["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        done = subprocess.run(
            [sys.executable, *launch, *address, "-m", "trainer.runner.check_links"],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=limit_s,
        )
    except subprocess.TimeoutExpired as error:
        kill_descendants()
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else ""
        return {"problem": f"it had not ended after {limit_s:g} s", "output": _last(output)}
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"backend"')]
    if done.returncode == 0 and lines:
        measured: dict[str, Any] = json.loads(lines[-1])
        return measured
    return {"problem": f"it ended with exit code {done.returncode}", "output": _last(done.stdout)}


def _last(output: str) -> str:
    """The last lines, those of NCCL and of the error among them."""
    lines = [line for line in output.splitlines() if "NCCL WARN" in line or "Error" in line]
    return "\n".join(lines[-LAST_LINES:] or output.splitlines()[-LAST_LINES:])


def measure() -> None:
    """In each process: add up, check the sum, and let the first one print the rate."""
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=JOIN_S))
    rank, world = dist.get_rank(), dist.get_world_size()
    size = GPU_BYTES if cuda else CPU_BYTES
    values = torch.full((size // 4,), float(rank + 1), device=device)
    dist.all_reduce(values)
    wanted = world * (world + 1) / 2
    if not bool((values == wanted).all()):
        raise ArithmeticError(f"the sum over {world} processes is not {wanted:g} everywhere: bad hardware")
    seconds = _seconds_of_one(values, cuda)
    if rank == 0:
        # Of the links, whatever the number of GPUs: what NCCL's own tests call bus bandwidth.
        moved = 2 * (world - 1) / world * size
        peers = [torch.cuda.can_device_access_peer(0, other) for other in range(1, world)] if cuda else None
        result = {
            "backend": "nccl" if cuda else "gloo",
            "processes": world,
            "bytes_s": moved / seconds,
            "peer_access": None if peers is None else all(peers),
        }
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
    dist.destroy_process_group()


def _seconds_of_one(values: Any, cuda: bool) -> float:
    import torch
    import torch.distributed as dist

    values.zero_()
    for _ in range(WARM_UP):
        dist.all_reduce(values)
    if cuda:
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(ROUNDS):
        dist.all_reduce(values)
    if cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / ROUNDS


if __name__ == "__main__":
    raise SystemExit(main())
