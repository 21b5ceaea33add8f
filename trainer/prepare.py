"""Rows to files, and a plan where there is none: a process of its own, because tokenizers bring torch along.

python -m trainer.prepare ASK.json
"""

from __future__ import annotations

import sys
from pathlib import Path

from core.plan import TrainingPlan
from trainer.callbacks.failures import failure_of
from trainer.inputs.text import read_task, write_task
from trainer.inputs.tokens import load_tokenizer, pad_token_for_engine
from trainer.loading import leave_out
from trainer.native import corpus
from trainer.own_plan import model_facts, own_plan
from trainer.sheet import Ask, Prepared, write_whole


def main(path: str) -> int:
    leave_out("sklearn")  # transformers' generation would take a second and more to import it
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
    if ask.run.dataset is None:
        return corpus.prepare(ask)
    tokenizer = load_tokenizer(ask.run.model_path)
    task = read_task(ask.run, tokenizer)
    if ask.plan_path is not None:
        plan = TrainingPlan.from_json(Path(ask.plan_path).read_bytes())
    else:
        plan = own_plan(ask.run, model_facts(Path(ask.run.model_path), ask.run.model_id), task.facts)
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
        other_path=str(files.other_path) if files.other_path else None,
    )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
