"""Two processes on the CPU that share a model by FSDP2, and plans for Axolotl runs that do."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from core.domain.choices import Parallelism
from core.planning.plan import FsdpPlan, TrainingPlan
from core.runs.run_files import RunSpec
from tests.trainer import tiny
from tests.trainer.forks import ForkServer
from trainer.runner.processes import free_port

HERE = Path(__file__).parent
#: What each rank says at the end of its work.
DONE = "all of it done\n"
#: Where this process finds modules: what tests need may be beside the training environment.
FOUND_IN = "TESTS_FOUND_IN"
#: For the environment of a run: with them accelerate shards on the CPU as well.
VARIABLES = {"PYTHONPATH": f"{HERE.parents[1]}:{HERE / 'fsdp_on_cpu'}", "FSDP_ON_CPU": "bf16"}


def sharded(run: RunSpec, *, whole: bool = False) -> RunSpec:
    """The same with weights split; `whole` where the planner saw room for all of them while it generates."""
    assert run.plan_path is not None
    path = Path(run.plan_path)
    plan = TrainingPlan.from_json(path.read_bytes())
    changes: dict[str, Any] = {
        "parallelism": Parallelism.FSDP,
        "fsdp": FsdpPlan(),
        "grpo": plan.grpo and plan.grpo.model_copy(update={"whole_layers": whole * plan.model.layers}),
    }
    path.write_text(plan.model_copy(update=changes).to_json(), encoding="utf-8")
    return run


def together(forks: ForkServer, folder: Path, work: Callable[[int], None], world: int = 2) -> bool:
    """`work(rank)`, a function of a test's module, in processes that gloo joins: whether all came to its end.
    One that fails fails the test, with all that they said."""
    named = f"{work.__module__}:{work.__name__}"
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), FOUND_IN: os.pathsep.join(sys.path)}
    code, said = forks.run(("-m", __name__, named, str(world)), environment, folder)
    assert code == 0, said
    return said.count(DONE) == world


def main(named: str, world: str) -> int:
    """In a fork of the process that has imported the stack: nothing has run there that a fork would miss."""
    beside = os.environ.get(FOUND_IN, "").split(os.pathsep)
    sys.path += [place for place in beside if place and place not in sys.path]
    module, function = named.split(":")
    work = getattr(importlib.import_module(module), function)
    port = str(free_port())
    children = []
    for rank in range(int(world)):
        child = os.fork()
        if child == 0:
            _as_rank(work, rank, int(world), port)
        children.append(child)
    ended = [os.waitpid(child, 0)[1] for child in children]
    return int(any(ended))


def _as_rank(work: Callable[[int], None], rank: int, world: int, port: str) -> NoReturn:
    import torch
    import torch.distributed as dist

    code = 1
    named = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ |= {key: str(value) for key, value in named.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    try:
        torch.set_num_threads(1)
        # One that goes its own way is waited for by the others, and that ends.
        dist.init_process_group("gloo", timeout=timedelta(seconds=300))
        work(rank)
        dist.barrier()
        sys.stdout.write(DONE)
        code = 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def split(model: Any, adapter: bool = False, registered: bool = True, **how: Any) -> Any:
    """As Axolotl prepares a model: every layer, with an adapter every matrix of it, and the whole."""
    from peft.tuners.lora import LoraLayer
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    layers = [one for one in model.modules() if type(one).__name__.endswith("DecoderLayer")]
    if adapter:
        for part in (one for one in model.modules() if isinstance(one, LoraLayer)):
            for matrix in (*part.lora_A.values(), *part.lora_B.values()):
                fully_shard(matrix, reshard_after_forward=True, **how)
    for layer in layers:
        fully_shard(layer, reshard_after_forward=True, **how)
    fully_shard(model, reshard_after_forward=True, **how)
    if registered:
        register_fsdp_forward_method(model, "generate")
    return model


def adapted(seed: int = 0) -> Any:
    """A little Llama with an adapter that does something, the same on every rank."""
    import torch
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny.model(seed=seed), LoraConfig(r=4, target_modules="all-linear"))
    torch.manual_seed(5)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.2)
    return model.eval()


class Gathers:
    """How often weights were gathered since."""

    def __init__(self) -> None:
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group as module

        self.count, self._plain = 0, module.foreach_all_gather
        module.foreach_all_gather = self

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.count += 1
        return self._plain(*arguments, **named)
