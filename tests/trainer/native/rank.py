"""One rank of a tiny run, for tests with several: writes the losses it saw as JSON.

usage: python -m tests.trainer.native.rank FOLDER single|ddp|fsdp lora|full [fail]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from core.choices import Parallelism
from core.plan_parts import FsdpPlan
from tests.trainer.native import tiny
from trainer.native import ranks, saving


def main(folder: Path, how: str, method: str, fail: str = "") -> None:
    with ranks.joined(cpu=True, hang_s=20) as group:
        plan = tiny.plan(full=method == "full", micro=8 // group.world, world=group.world, steps=8)
        if how == "fsdp":
            plan = plan.model_copy(update={"parallelism": Parallelism.FSDP, "fsdp": FsdpPlan()})
        coach = tiny.Recorder()
        made = tiny.loop(folder, plan, coach, group)
        if fail == "resume":
            state = saving.newest(folder / "states")
            assert state is not None
            made.resume(state)
        if fail == "die" and group.rank == 1:
            os._exit(7)
        made.run()
        saving.export(made.net, folder / f"out-{how}", group)
        told = {
            "losses": [step.loss for step in coach.steps],
            "norms": [step.norm for step in coach.steps],
            "held_out": coach.losses,
        }
        (folder / f"{how}-{group.rank}{fail}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
