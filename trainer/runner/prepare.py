"""Rows to files, and a plan if there is none yet: a process of its own, because tokenizers bring torch along.

python -m trainer.runner.prepare SPEC.json
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from core.data.facts import MADE_ROWS, assumed_facts
from core.domain.choices import Engine
from core.models.facts import ModelFacts
from core.planning.plan import TrainingPlan
from core.runs.run_files import RunSpec
from trainer.environments.task import ROWS_SHARES, RowsInTheMaking, encode_made, trained_rows
from trainer.environments.template_probe import fitting_encoder
from trainer.errors import BadData
from trainer.handoff import PreparedRows, PrepareSpec, write_record
from trainer.inputs import corpus
from trainer.inputs.files import read_rows
from trainer.inputs.model_loading import block_imports
from trainer.inputs.text import encode_task, try_rows, write_task
from trainer.inputs.tokens import import_tokenizers, load_tokenizer, model_window, pad_token_for_engine
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
        return _prepare_corpus(spec)
    asked = TrainingPlan.from_json(Path(spec.plan_path).read_bytes()) if spec.plan_path is not None else None
    making = _start_making(spec.run, asked) if spec.run.task_type.makes_rows else None
    import_tokenizers()
    with _trial(spec):
        tokenizer = load_tokenizer(spec.run.model_path)
    records, notes = making.rows() if making is not None else (read_rows(Path(spec.run.data_path)), ())
    with _trial(spec):
        if making is None:
            try_rows(spec.run, records, tokenizer)
        else:
            fitting_encoder(tokenizer, records, spec.run.model_path)
    encode = encode_task if making is None else encode_made
    task = encode(spec.run, records, tokenizer)
    task = replace(task, notes=(*notes, *task.notes))
    plan = asked or make_own_plan(spec.run, _facts(spec.run), task.facts)
    Path(spec.plan_out).write_text(plan.to_json(), encoding="utf-8")
    prepared = write_task(task, plan, Path(spec.folder))
    for text in prepared.notes:
        ProgressLog(Path(spec.run.progress_path)).note("data", text)
    return prepared.model_copy(update={"pad_token": pad_token_for_engine(tokenizer)})


def _prepare_corpus(spec: PrepareSpec) -> PreparedRows:
    """Prepare plain text for pretraining."""
    run, source = spec.run, Path(spec.run.data_path)
    progress = ProgressLog(Path(run.progress_path))
    tokenizer, vocabulary = corpus.load_corpus(run.model_path)
    window = model_window(run.model_path) or 2048
    folder = source if corpus.is_corpus(source) else Path(run.work_dir) / "corpus"
    if folder == source:
        documents = corpus.open_corpus(source, vocabulary, window, check=True)
    else:
        documents = corpus.build_corpus(source, folder, tokenizer, vocabulary, progress)
    if spec.plan_path is not None:
        plan = TrainingPlan.from_json(Path(spec.plan_path).read_bytes())
    else:
        model = model_facts(Path(run.model_path), run.model_id)
        plan = make_own_plan(run, model, corpus.corpus_facts(documents, window))
        # Long documents are cut to what the plan takes at once, which is more rows than it knew of.
        plan = make_own_plan(run, model, corpus.corpus_facts(documents, plan.sequence.length))
    if plan.engine is not Engine.NATIVE:
        raise BadData(
            f"{source} is plain text, which the native trainer alone takes; the plan names {plan.engine}"
        )
    Path(spec.plan_out).write_text(plan.to_json(), encoding="utf-8")
    if folder.suffix == corpus.RAW:
        documents = corpus.open_corpus(folder, vocabulary, plan.sequence.length)
    train, held = corpus.split_corpus(documents, plan, "train"), corpus.split_corpus(documents, plan, "eval")
    if not len(train):
        raise BadData(f"{source} has too few documents: {len(documents)}")
    return PreparedRows(
        train_path=folder,
        eval_path=folder if len(held) else None,
        train_rows=len(train),
        eval_rows=len(held),
        digest=hashlib.sha256(repr(train.fingerprint()).encode()).hexdigest(),
        pad_token=pad_token_for_engine(tokenizer),
    )


@contextmanager
def _trial(spec: PrepareSpec) -> Iterator[None]:
    """Mark a trial, so that the runner ends this process if it takes too long: a template or tokenizer may
    never end, and no thread of this process is sure to run beside it."""
    spec.trial_path.touch()
    yield
    spec.trial_path.unlink()


def _facts(run: RunSpec) -> ModelFacts:
    return model_facts(Path(run.model_path), run.model_id)


def _plans_before(run: RunSpec) -> Iterator[TrainingPlan]:
    """Plan for several numbers of rows: encoding more than can be trained on takes time from the training."""
    model = _facts(run)
    for share in ROWS_SHARES:
        facts = assumed_facts(run.task_type, round(MADE_ROWS * share))
        yield make_own_plan(run, model, facts, rows_made=False)


def _start_making(run: RunSpec, asked: TrainingPlan | None) -> RowsInTheMaking:
    """Start to make as many rows as can be trained on in the time that is left after making them."""
    plan = asked or max(_plans_before(run), key=trained_rows)
    making = RowsInTheMaking.start(run, plan)
    if making.processes:
        ProgressLog(Path(run.progress_path)).stage("generate", str(making))
    return making


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
