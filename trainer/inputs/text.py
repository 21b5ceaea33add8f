"""A text task from its file to what the engine reads.

    task = read_task(spec, tokenizer)            # the rows in tokens, and the facts that a plan needs
    files = write_task(task, plan, folder)       # training and held-out rows, for Axolotl and for the scores

The original is never touched, and the same task, plan and folder give the same files.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from core.data.facts import DatasetFacts, facts_from_lengths
from core.domain.evaluation import (
    GRPO_COMPLETION,
    GRPO_KL_LENGTH,
    UNKNOWN_WINDOW,
    Era,
    EvaluationRules,
    evaluation_rules,
    sequence_limit,
)
from core.domain.tasks import (
    ChatDataset,
    DpoDataset,
    GrpoDataset,
    InstructDataset,
    TaskType,
)
from core.planning.plan import TrainingPlan
from core.recipes.axolotl.data_keys import GRPO_EXTRA, reward_name
from core.runs.run_files import RunSpec
from trainer.errors import BadData, BadReward
from trainer.handoff import PreparedRows
from trainer.inputs.chat import chat_rows
from trainer.inputs.dpo_grpo import (
    cut_pair,
    extra_text,
    has_equal_answers,
    pair_rows,
    prompt_rows,
    shorten_prompts,
)
from trainer.inputs.files import RawRow, read_rows, texts_in
from trainer.inputs.instruct import count_learned, instruct_rows, is_completion, split_completion
from trainer.inputs.split import fingerprint, hold_out, near_duplicates
from trainer.inputs.tables import write_table
from trainer.inputs.tokens import (
    IGNORED,
    Ids,
    LabelledRow,
    PairRow,
    PromptRow,
    Row,
    Tokenizer,
    encode,
    model_rows,
    model_window,
)
from trainer.rewards.sandbox import LATE, Rewards
from trainer.rewards.source import REWARD_TABLE, disable_rewards, write_rewards

#: Why rows are missing, as shown to the operator.
NO_ANSWER, NO_PROMPT, TOO_LONG, EQUAL, UNKNOWN = (
    "no answer",
    "no prompt",
    "too long",
    "equal answers",
    "a token that the model has no row for",
)
_DONE = "done.json"
#: Prompts on which the rewards are tried.
TRIED = 5


@dataclass(frozen=True)
class TextTask:
    """A task's rows as its evaluation reads them."""

    spec: RunSpec
    tokenizer: Tokenizer
    rows: Sequence[Row]
    #: Of each row: the same for rows that differ in case, blanks and punctuation only.
    fingerprints: Sequence[int]
    #: Why rows are missing, and how many for each reason.
    dropped: Mapping[str, int]
    #: Measured with the model's own tokenizer.
    facts: DatasetFacts
    #: Tokens of the longest row (DPO: pair) that evaluation reads.
    limit: int
    #: DPO: what the rows were made from, to read some of them by the other era's rules.
    records: Sequence[RawRow] = ()
    #: What the operator should know of the rows.
    notes: tuple[str, ...] = ()

    @property
    def rules(self) -> EvaluationRules:
        return evaluation_rules(self.spec.era)


#: Rows for the trial of a template and a tokenizer.
FIRST_ROWS = 8


def try_rows(spec: RunSpec, records: Sequence[RawRow], tokenizer: Tokenizer) -> None:
    """Encode the first rows, without using the result."""
    dataset, rows = spec.dataset, list(records[:FIRST_ROWS])
    with suppress(BadData):  # reported when all rows are encoded
        if isinstance(dataset, DpoDataset):
            list(pair_rows(dataset, rows, tokenizer, evaluation_rules(spec.era)))
        elif isinstance(dataset, GrpoDataset):
            list(encode(tokenizer, [row.prompt for row in prompt_rows(dataset, rows)]))
        elif isinstance(dataset, InstructDataset | ChatDataset):
            list(_encoded(dataset, rows, tokenizer, UNKNOWN_WINDOW))


def read_task(spec: RunSpec, tokenizer: Tokenizer) -> TextTask:
    """Read and encode a task's rows; `BadData` when nothing can be trained from them."""
    return encode_task(spec, read_rows(Path(spec.data_path)), tokenizer)


def encode_task(spec: RunSpec, records: list[RawRow], tokenizer: Tokenizer) -> TextTask:
    window = model_window(spec.model_path)
    if isinstance(spec.dataset, DpoDataset):
        return _pairs(spec, spec.dataset, records, tokenizer, window)
    if isinstance(spec.dataset, GrpoDataset):
        return _prompts(spec, spec.dataset, records, tokenizer)
    if isinstance(spec.dataset, InstructDataset | ChatDataset):
        return _labelled(spec, spec.dataset, records, tokenizer, window)
    raise BadData(f"a task of type {spec.task_type} with {spec.dataset!r} is not trained from rows of text")


def _labelled(
    spec: RunSpec,
    dataset: InstructDataset | ChatDataset,
    records: list[RawRow],
    tokenizer: Tokenizer,
    window: int | None,
) -> TextTask:
    """Encode supervised rows. If no row is short enough, evaluation tries twice the length, up to the model's
    window."""
    limit, most = sequence_limit(window), window or 2 * sequence_limit(window)
    known = within_vocabulary(spec)
    while True:
        kept: list[LabelledRow] = []
        prints, dropped = array("Q"), Counter[str]()
        for record, row in zip(records, _encoded(dataset, records, tokenizer, limit), strict=True):
            reason = drop_reason(row, limit, is_completion(dataset))
            if reason is None and row is not None and not known(row.ids):
                reason = UNKNOWN
            if reason is not None or row is None:
                dropped[reason or NO_ANSWER] += 1
                continue
            parts = list(split_completion(row, limit)) if is_completion(dataset) else [row]
            kept += parts
            if len(parts) == 1:
                prints.append(fingerprint(texts_in(record)))
            else:  # pieces of one text are no doubles of each other
                prints.extend(fingerprint([str(list(part.ids))]) for part in parts)
        if kept or limit >= most or not dropped[TOO_LONG]:
            break
        limit = min(2 * limit, most)
    require_rows(kept, dropped, f"the longest that evaluation takes is {limit} tokens")
    answers = [count_learned(row.labels) for row in kept]
    prompts = [len(row.ids) - answer for row, answer in zip(kept, answers, strict=True)]
    facts = facts_from_lengths(spec.task_type, prompts, answers)
    return TextTask(spec, tokenizer, kept, prints, dict(dropped), facts, limit)


def within_vocabulary(spec: RunSpec) -> Callable[[Ids], bool]:
    """Return a check that the model has a row for each token: a single row of data beyond them would end the
    training."""
    rows = model_rows(spec.model_path)
    return lambda ids: max(ids, default=0) < rows


def _encoded(
    dataset: InstructDataset | ChatDataset, records: list[RawRow], tokenizer: Tokenizer, limit: int
) -> Iterator[LabelledRow | None]:
    if isinstance(dataset, InstructDataset):
        return instruct_rows(dataset, records, tokenizer, limit)
    return chat_rows(dataset, records, tokenizer)


def drop_reason(row: LabelledRow | None, limit: int, completion: bool) -> str | None:
    """Evaluation drops rows of one token and rows without a label, and all that are too long. Nothing
    predicts the first token: a row that is to learn that one alone would have no loss at all."""
    if row is None or len(row.ids) < 2 or count_learned(row.labels) <= (row.labels[0] != IGNORED):
        return NO_ANSWER
    return TOO_LONG if len(row.ids) > limit and not completion else None


def _pairs(
    spec: RunSpec, dataset: DpoDataset, records: list[RawRow], tokenizer: Tokenizer, window: int | None
) -> TextTask:
    rules = evaluation_rules(spec.era)
    limit, known = rules.dpo_limit(window), within_vocabulary(spec)
    kept, sources = list[PairRow](), list[RawRow]()
    prints, dropped = array("Q"), Counter[str]()
    for record, pair in zip(records, pair_rows(dataset, records, tokenizer, rules), strict=True):
        row = cut_pair(pair, rules, limit)
        if row is None or has_equal_answers(row):
            dropped[TOO_LONG if row is None else EQUAL] += 1
            continue
        if not all(map(known, row)):
            dropped[UNKNOWN] += 1
            continue
        kept.append(row)
        sources.append(record)
        prints.append(fingerprint(texts_in(record)))
    require_rows(kept, dropped, "every pair needs two different answers")
    lengths = [[len(row[side]) for row in kept] for side in range(3)]
    facts = facts_from_lengths(TaskType.DPO, lengths[0], lengths[1], lengths[2])
    return TextTask(spec, tokenizer, kept, prints, dict(dropped), facts, limit, sources)


def _by_the_other_rules(task: TextTask, held: Sequence[Row], places: Sequence[int]) -> list[Row]:
    """The held-out pairs as the other generation of evaluation encodes them; none where that is the same."""
    if not isinstance(task.spec.dataset, DpoDataset) or not held:
        return []
    (era,) = set(Era) - {task.spec.era}
    rules, known = evaluation_rules(era), within_vocabulary(task.spec)
    limit = rules.dpo_limit(model_window(task.spec.model_path))
    records = [task.records[place] for place in places]
    others: list[Row] = []
    for pair in pair_rows(task.spec.dataset, records, task.tokenizer, rules):
        row = cut_pair(pair, rules, limit)
        if row is not None and not has_equal_answers(row) and all(map(known, row)):
            others.append(row)
    return [] if others == list(held) else others


def _prompts(spec: RunSpec, dataset: GrpoDataset, records: list[RawRow], tokenizer: Tokenizer) -> TextTask:
    kept: list[PromptRow] = []
    prints, dropped = array("Q"), Counter[str]()
    known, sizes, rows = within_vocabulary(spec), list[int](), list(prompt_rows(dataset, records))
    encoded = encode(tokenizer, [row.prompt for row in rows], special_tokens=False)
    for row, ids in zip(rows, encoded, strict=True):
        if not row.prompt.strip() or not known(ids):
            dropped[UNKNOWN if row.prompt.strip() else NO_PROMPT] += 1
            continue
        kept.append(row)
        sizes.append(len(ids))
        prints.append(fingerprint([row.prompt]))
    require_rows(kept, dropped, "every row needs a prompt")
    facts = facts_from_lengths(TaskType.GRPO, sizes, [0] * len(sizes))
    limit = (evaluation_rules(spec.era).grpo_prompt or GRPO_KL_LENGTH) + GRPO_COMPLETION
    return TextTask(spec, tokenizer, kept, prints, dict(dropped), facts, limit)


def require_rows(rows: Sequence[Row], dropped: Mapping[str, int], rule: str) -> None:
    if not rows:
        reasons = ", ".join(f"{count} with {reason}" for reason, count in sorted(dropped.items()))
        raise BadData(f"no row can be trained on: {reasons or 'there are none'}; {rule}")


def write_task(task: TextTask, plan: TrainingPlan, folder: Path) -> PreparedRows:
    """Rows longer than the plan's sequence are dropped or cut by the evaluation's rule; the rest is split.

    Held-out rows are as long as evaluation takes them, whatever the training can afford.
    """
    # Rows that were made share the rules of their games; copies of one position are held out together.
    made = task.spec.task_type.makes_rows
    compared = [] if made else [_tokens(row) for row in task.rows]
    clusters = near_duplicates(compared, task.fingerprints)
    split = hold_out(clusters, [_answer(row) for row in task.rows], plan.steps.eval_rows, plan.targets.seed)
    train = list(_fitted(task, [task.rows[place] for place in split.train], plan))
    held = list(_fitted(task, [task.rows[place] for place in split.held], None))
    other = _by_the_other_rules(task, held, split.held)
    dropped = Counter(task.dropped)
    dropped[TOO_LONG] += max(len(split.train) - len(train), 0)
    require_rows(train, +dropped, f"the plan's sequences are {plan.sequence.length} tokens long")
    digest = _digest([*train, *held], task, len(train))
    place = folder / digest[:16]
    if not (place / _DONE).is_file():
        _write(place, train, held, other, digest)
    return PreparedRows(
        train_path=place / "train",
        eval_path=place / "eval" if held else None,
        train_rows=len(train),
        eval_rows=len(held),
        dropped=dict(+dropped),
        notes=tuple(task.notes),
        digest=digest,
        rewards_dir=_rewards(task, place / "rewards"),
        other_path=place / "other" if other else None,
    )


def _rewards(task: TextTask, folder: Path) -> Path | None:
    """Write module and table of the rewards, and try each on some prompts as validators do."""
    dataset = task.spec.dataset
    if not isinstance(dataset, GrpoDataset):
        return None
    rows = [row for row in task.rows if isinstance(row, PromptRow)]
    as_json = any(row.extra is not None and not isinstance(row.extra, str) for row in rows)
    progress = task.spec.progress_path
    write_rewards(dataset, folder, era=task.spec.era, progress_path=progress, extra_is_json=as_json)
    rewards = Rewards.open(folder / REWARD_TABLE)
    try:
        extra = [extra_text(row.extra) for row in rows[:TRIED]]
        prompts = [row.prompt for row in rows[:TRIED]]
        columns = {GRPO_EXTRA: extra} if any(extra) else {}
        problems = rewards.problems(prompts, prompts=prompts, **columns)
    finally:
        rewards.close()
    if all(problems):
        shown = "; ".join(f"{reward_name(place)}: {problem}" for place, problem in enumerate(problems))
        raise BadReward(f"none of the task's reward functions gives rewards: {shown}"[:2000])
    # Each process would wait for it as long again, several times: minutes that others are trained in.
    late = {
        place: f"{problem} before the training" for place, problem in enumerate(problems) if problem == LATE
    }
    if late:
        disable_rewards(folder, late)
    return folder


def _tokens(row: Row) -> Ids:
    """The tokens of a row by which near-duplicates are found."""
    if isinstance(row, LabelledRow):
        return row.ids
    if isinstance(row, PairRow):
        return [*row.prompt, *row.chosen]
    return list(row.prompt.encode("utf-8", "replace"))


def _answer(row: Row) -> Ids:
    """Return the learned tokens of a row, by which easy rows differ from difficult ones; other labels are
    ignored."""
    if isinstance(row, LabelledRow):
        return row.labels
    return row.chosen if isinstance(row, PairRow) else _tokens(row)


def _fitted(task: TextTask, rows: Sequence[Row], plan: TrainingPlan | None) -> Iterator[Row]:
    """The rows at the plan's length; without a plan at the evaluation's."""
    if isinstance(task.spec.dataset, GrpoDataset):
        most = plan.sequence.prompt_limit if plan is not None else None
        yield from _shortened(task, [row for row in rows if isinstance(row, PromptRow)], most)
        return
    length = min(plan.sequence.length, task.limit) if plan is not None else task.limit
    for row in rows:
        if isinstance(row, PairRow):
            shorter = cut_pair(row, task.rules, length)
            if shorter is not None and not has_equal_answers(shorter):
                yield shorter
        elif isinstance(row, LabelledRow):
            if len(row.ids) <= length:
                yield row
            elif is_completion(task.spec.dataset):
                yield from split_completion(row, length)


def _shortened(task: TextTask, rows: Sequence[PromptRow], most: int | None) -> Iterator[PromptRow]:
    limit = most or task.rules.grpo_prompt or GRPO_KL_LENGTH
    texts = shorten_prompts([row.prompt for row in rows], task.tokenizer, task.rules, limit)
    for row, text in zip(rows, texts, strict=True):
        yield PromptRow(text, row.extra)


def _digest(rows: Iterable[Row], task: TextTask, trained: int) -> str:
    digest = hashlib.sha256(f"{task.spec.era} {trained}".encode())
    for row in rows:
        if isinstance(row, PromptRow):
            digest.update(json.dumps([row.prompt, row.extra], default=str).encode())
        else:
            for part in row:
                digest.update(len(part).to_bytes(4, "big") + array("i", part).tobytes())
    return digest.hexdigest()


def _write(place: Path, train: Sequence[Row], held: Sequence[Row], other: Sequence[Row], digest: str) -> None:
    """Write beside the final folder first: an interrupted write is never taken for a complete one."""
    unfinished = place.with_name(f".{place.name}.new")
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.rmtree(place, ignore_errors=True)
    unfinished.mkdir(parents=True)
    write_table(train, unfinished / "train")
    for name, rows in (("eval", held), ("other", other)):
        if rows:
            write_table(rows, unfinished / name)
    (unfinished / _DONE).write_text(json.dumps({"train": len(train), "eval": len(held), "digest": digest}))
    unfinished.rename(place)
