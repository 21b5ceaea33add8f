"""One rank of a tiny run, for tests with several.

usage: python -m tests.trainer.native.rank FOLDER single|ddp|fsdp lora|full [fail]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from core.choices import Parallelism
from core.plan_parts import FsdpPlan
from tests.trainer.native import tiny
from trainer.native import ranks, saving


def main(folder: Path, how: str, method: str, fail: str = "") -> None:
    with ranks.joined(cpu=True, hang_s=20 if fail == "die" else 300) as group:
        plan = tiny.plan(full=method == "full", micro=8 // group.world, world=group.world, steps=8)
        if how == "fsdp":
            plan = plan.model_copy(update={"parallelism": Parallelism.FSDP, "fsdp": FsdpPlan()})
        made = tiny.loop(folder, plan, group, name=how)
        if fail == "resume":
            state = saving.newest(folder / how / "states")
            assert state is not None
            assert made.resume(state) == state
        if fail == "die" and group.rank == 1:
            os._exit(7)
        made.run()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
