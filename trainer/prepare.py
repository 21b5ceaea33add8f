"""Rows to files, and a plan where there is none: a process of its own, because tokenizers bring torch along.

python -m trainer.prepare ASK.json
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from core.budget import Verdict
from core.model_facts import facts_from_config
from core.models import ModelFacts
from core.plan import TrainingPlan
from core.plan_parts import TaskSpec
from core.planning.costs import Site
from core.planning.planner import plan as make_plan
from core.profile import load_profile, resolve
from core.run_files import RunSpec
from trainer.callbacks.failures import failure_of
from trainer.errors import BadModel
from trainer.inputs.text import TextTask, read_task, write_task
from trainer.inputs.tokens import load_tokenizer, pad_token_for_engine
from trainer.machine import machine
from trainer.sheet import Ask, Prepared, write_whole

#: Which profile a run that plans for itself follows, by name or path.
PROFILE_VARIABLE = "GOD_MINER_PROFILE"
PROFILE, PROFILE_CPU = "steady", "cpu-demo"


def main(path: str) -> int:
    ask = Ask.model_validate_json(Path(path).read_bytes())
    try:
        prepared = prepare(ask)
    except Exception as error:  # noqa: BLE001 - the wrapper reads from the file why
        write_whole(Path(ask.failure_out), failure_of(error, "load"))
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    write_whole(Path(ask.prepared_out), prepared)
    return 0


def prepare(ask: Ask) -> Prepared:
    tokenizer = load_tokenizer(ask.run.model_path)
    task = read_task(ask.run, tokenizer)
    if ask.plan_path is not None:
        plan = TrainingPlan.from_json(Path(ask.plan_path).read_bytes())
    else:
        plan = own_plan(ask.run, task)
    Path(ask.plan_out).write_text(plan.to_json(), encoding="utf-8")
    files = write_task(task, plan, Path(ask.folder))
    return Prepared(
        train_path=str(files.train_path),
        eval_path=str(files.eval_path) if files.eval_path else None,
        train_rows=files.train_rows,
        eval_rows=files.eval_rows,
        dropped=dict(files.dropped),
        digest=files.digest,
        rewards_dir=str(files.rewards_dir) if files.rewards_dir else None,
        pad_token=pad_token_for_engine(tokenizer),
    )


def model_facts(folder: Path, model_id: str) -> ModelFacts:
    """By the model's own config and the size of its weights: names may be made up in tournaments."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise BadModel(f"{folder / 'config.json'} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise BadModel(f"{folder / 'config.json'} holds no object")
    return facts_from_config(config, model_id)


def own_plan(run: RunSpec, task: TextTask) -> TrainingPlan:
    """For the GPUs that are seen here, in the time that is left."""
    model = model_facts(Path(run.model_path), run.model_id)
    hardware = machine(Path(run.work_dir))
    spec = TaskSpec(
        task_type=run.task_type,
        hours=max(run.deadline_at - time.time(), 0.0) / 3600,
        task_id=run.task_id,
        kl_coefficient=run.kl_coefficient,
    )
    name = os.environ.get(PROFILE_VARIABLE) or (PROFILE_CPU if hardware.gpus.is_cpu else PROFILE)
    profile = resolve(load_profile(name), run.task_type, model)
    # Nobody can be refused here, so what the profile keeps free for a daemon's publishing is training time.
    free = {"reserve": run.deadline_at - run.end_by, "reserve_share": 0.0, "min_epochs": 0.0}
    own = profile.model_copy(update={"limits": profile.limits.model_copy(update=free)})
    site = Site(hardware, model_here=True, publishes=False)
    return at_least_tried(make_plan(spec, model, task.facts, hardware, own, site=site))


def at_least_tried(plan: TrainingPlan) -> TrainingPlan:
    """A plan that expects to fail is followed all the same: the ladder may find what fits, and a training
    that is cut off has submitted something."""
    if plan.verdict.feasible:
        return plan
    total = max(plan.steps.total, 1)
    steps = plan.steps.model_copy(
        update={"total": total, "epochs": max(plan.steps.epochs, total / max(plan.steps.per_epoch, 1))}
    )
    note = f"tried although it does not look feasible: {plan.verdict.reason}"
    update = {"steps": steps, "verdict": Verdict(feasible=True), "notes": (*plan.notes, note)}
    return plan.model_copy(update=update)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
