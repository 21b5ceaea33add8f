"""Rows to files, and a plan where there is none: a process of its own, because tokenizers bring torch along.

python -m trainer.runner.prepare SPEC.json
"""

from __future__ import annotations

import sys
from pathlib import Path

from core.planning.plan import TrainingPlan
from trainer.handoff import PreparedRows, PrepareSpec, write_record
from trainer.inputs.model_loading import block_imports
from trainer.inputs.text import read_task, write_task
from trainer.inputs.tokens import load_tokenizer, pad_token_for_engine
from trainer.native import corpus
from trainer.runner.planning import make_own_plan, model_facts
from trainer.session.failures import failure_of
from trainer.session.progress_log import ProgressLog


def main(path: str) -> int:
    block_imports("sklearn")  # transformers' generation would take a second and more to import it
    spec = PrepareSpec.model_validate_json(Path(path).read_bytes())
    try:
        prepared = prepare(spec)
    except Exception as error:  # noqa: BLE001 - the runner reads the reason from the file
        write_record(Path(spec.failure_out), failure_of(error, "load"))
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    write_record(Path(spec.prepared_out), prepared)
    return 0


def prepare(spec: PrepareSpec) -> PreparedRows:
    if spec.run.dataset is None:
        return corpus.prepare_corpus(spec)
    tokenizer = load_tokenizer(spec.run.model_path)
    task = read_task(spec.run, tokenizer)
    if spec.plan_path is not None:
        plan = TrainingPlan.from_json(Path(spec.plan_path).read_bytes())
    else:
        plan = make_own_plan(spec.run, model_facts(Path(spec.run.model_path), spec.run.model_id), task.facts)
    Path(spec.plan_out).write_text(plan.to_json(), encoding="utf-8")
    prepared = write_task(task, plan, Path(spec.folder))
    for text in prepared.notes:
        ProgressLog(Path(spec.run.progress_path)).note("data", text)
    return prepared.model_copy(update={"pad_token": pad_token_for_engine(tokenizer)})


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
