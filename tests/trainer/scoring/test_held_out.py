"""Held-out scores during a training."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments
from trl import DPOConfig, DPOTrainer

from core.domain.evaluation import UNTRAINED_DPO, Era, evaluation_rules
from core.domain.tasks import DpoDataset, TaskType
from tests.trainer import tiny
from tests.trainer.tasks import rows_plan, spec
from trainer.axolotl.trainers import PairTrainer
from trainer.inputs.dpo_grpo import cut_pair, pair_rows
from trainer.inputs.tables import PAIR_COLUMNS
from trainer.inputs.text import read_task, write_task
from trainer.inputs.tokens import IGNORED, LabelledRow, PairRow, load_tokenizer
from trainer.scoring import held_out
from trainer.scoring.held_out import HeldOut, pair_log_probs, pair_losses, row_losses

TASKS = (TaskType.INSTRUCT, TaskType.CHAT, TaskType.DPO, TaskType.GRPO)


def opened(folder: Path, task: TaskType, **changes: Any) -> HeldOut:
    run = spec(folder, task, **changes)
    tokenizer = load_tokenizer(run.model_path)
    plan = rows_plan(task, eval_rows=3 if task.generates else 12)  # generating takes its time
    return HeldOut.open(run, write_task(read_task(run, tokenizer), plan, folder / "data"), tokenizer)


def adapted(folder: Path, *, moved: bool) -> Any:
    """The base with an adapter, which does nothing until it is moved."""
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=not moved)
    return get_peft_model(tiny.load(folder / "model"), config)


@pytest.mark.parametrize("task", TASKS)
def test_an_untouched_adapter_scores_like_the_base(tmp_path: Path, task: TaskType) -> None:
    held = opened(tmp_path, task)
    base = held.remember_base(tiny.load(tmp_path / "model"))
    now = held.score(adapted(tmp_path, moved=False))
    assert now.value == pytest.approx(base.value, abs=1e-3)
    if task.has_pairs:
        assert base.value == pytest.approx(math.log(2))
    if task.generates:
        assert base.value == pytest.approx(0.0, abs=1e-6)
        assert not base.lower_is_better


@pytest.mark.parametrize("task", TASKS)
def test_a_moved_adapter_scores_otherwise_and_the_same_every_time(tmp_path: Path, task: TaskType) -> None:
    held = opened(tmp_path, task)
    base = held.remember_base(tiny.load(tmp_path / "model"))
    model = adapted(tmp_path, moved=True)
    now = held.score(model)
    assert now.value != base.value
    assert held.score(model).value == now.value
    assert now.metric == base.metric


@pytest.mark.parametrize("task", TASKS)
def test_the_ranks_scores_add_up_to_the_score_of_all(tmp_path: Path, task: TaskType) -> None:
    held, model = opened(tmp_path, task), adapted(tmp_path, moved=True)
    parts = [held.remember_base(tiny.load(tmp_path / "model"), rank=rank, world=3) for rank in range(3)]
    held.base = parts[0].merged([sum(column) for column in zip(*(part.sums for part in parts), strict=True)])
    scores = [held.score(model, rank=rank, world=3) for rank in range(3)]
    together = scores[0].merged([sum(column) for column in zip(*(one.sums for one in scores), strict=True)])
    if task.generates:
        assert math.isfinite(together.value), "ranks sample other completions than one process does"
        return
    alone = opened(tmp_path, task)
    alone.remember_base(tiny.load(tmp_path / "model"))
    assert together.value == pytest.approx(alone.score(model).value, rel=1e-4)
    for shares in (parts, scores):
        assert sorted(place for one in shares for place in one.rows) == list(range(len(held.rows)))


def test_preferences_need_no_reference_in_memory_while_the_base_is_remembered(tmp_path: Path) -> None:
    held = opened(tmp_path, TaskType.DPO)
    held.remember_base(tiny.load(tmp_path / "model"))
    full = tiny.model(seed=9)
    with_memory = held.score(full).value
    fresh = opened(tmp_path, TaskType.DPO)
    assert fresh.score(full, reference=tiny.load(tmp_path / "model")).value == pytest.approx(with_memory)
    with pytest.raises(ValueError, match="give the base model"):
        opened(tmp_path, TaskType.DPO).score(full)


def test_a_task_with_a_kl_term_is_scored_with_it(tmp_path: Path) -> None:
    plain = opened(tmp_path, TaskType.INSTRUCT)
    model = adapted(tmp_path, moved=True)
    without = plain.score(model)
    dear = opened(tmp_path, TaskType.INSTRUCT, kl_coefficient=2.0)
    with_kl = dear.score(model)
    assert with_kl.metric == "eval_loss+kl"
    kl = with_kl.sums[2] / with_kl.sums[3]
    assert kl > 0
    assert with_kl.value == pytest.approx(without.value + 2.0 * kl, rel=1e-4)
    assert dear.score(model, reference=tiny.load(tmp_path / "model")).value == pytest.approx(
        with_kl.value, rel=1e-4
    )


def test_preferences_are_scored_by_the_rules_of_both_eras_where_these_differ(tmp_path: Path) -> None:
    """Prompts with an end token, answers that lose their first: what gains there must not lose elsewhere."""
    chances = {}
    for era in Era:
        for adds_begin in (True, False):
            folder = tmp_path / f"{era}-{adds_begin}"
            tiny.save(folder / "model", adds_begin=adds_begin)
            rows = [{**row, "prompt": f"{row['prompt']}\n"} for row in tiny.pair_rows(60)]
            run = spec(folder, TaskType.DPO, rows, era=era)
            tokenizer = load_tokenizer(run.model_path)
            files = write_task(read_task(run, tokenizer), rows_plan(TaskType.DPO), folder / "data")
            chances[era, adds_begin] = files.other_path is not None
    assert chances == {(era, adds_begin): adds_begin for era in Era for adds_begin in (True, False)}

    rows = [row for row in opened(tmp_path, TaskType.DPO).rows if isinstance(row, PairRow)]
    turned = [PairRow(row.prompt, row.rejected, row.chosen) for row in rows]
    run, tokenizer = spec(tmp_path, TaskType.DPO), load_tokenizer(str(tmp_path / "model"))
    model, base = adapted(tmp_path, moved=True), tiny.load(tmp_path / "model")
    values = []
    for mine, other in ((rows, ()), (turned, ()), (rows, turned), (turned, rows), (rows, rows)):
        held = HeldOut(run, mine, tokenizer, other=other)
        assert held.remember_base(base).value == pytest.approx(UNTRAINED_DPO)
        values.append(held.score(model).value)
        fresh = HeldOut(run, mine, tokenizer, other=other)
        assert fresh.score(model, reference=base).value == pytest.approx(values[-1])
    straight, backward, *guarded = values
    assert min(straight, backward) < UNTRAINED_DPO < max(straight, backward)
    worse = max(straight, backward)
    assert guarded == pytest.approx([worse, worse, straight])


def test_rewards_are_scored_against_the_base_only(tmp_path: Path) -> None:
    held = opened(tmp_path, TaskType.GRPO)
    measured = held.score(adapted(tmp_path, moved=False))
    with pytest.raises(ValueError, match="remember_base comes first"):
        _ = measured.value


def test_without_held_out_rows_there_is_nothing_to_open(tmp_path: Path) -> None:
    run = spec(tmp_path, TaskType.CHAT, tiny.chat_rows(2))
    tokenizer = load_tokenizer(run.model_path)
    files = write_task(read_task(run, tokenizer), rows_plan(TaskType.CHAT), tmp_path / "data")
    with pytest.raises(ValueError, match="no rows were held out"):
        HeldOut.open(run, files, tokenizer)


def labelled(count: int, seed: int = 0, longest: int = 60) -> list[LabelledRow]:
    """Answers at the end, in the middle and in several places."""
    chance = random.Random(seed)
    rows = []
    for _ in range(count):
        ids = [chance.randrange(5, 400) for _ in range(chance.randint(2, longest))]
        labels = [one if chance.random() < 0.5 else IGNORED for one in ids]
        labels[-1] = ids[-1]
        rows.append(LabelledRow(ids, labels))
    return rows


def one_by_one(model: Any, row: LabelledRow) -> float:
    """As validators do: batch of one, the model's own loss."""
    ids, labels = torch.tensor([list(row.ids)]), torch.tensor([list(row.labels)])
    with torch.no_grad():
        return float(model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss)


@pytest.mark.parametrize("kind", tiny.KINDS)
@pytest.mark.parametrize("max_tokens", [1, 64, 100_000])
def test_batched_losses_are_those_of_every_row_by_itself(kind: str, max_tokens: int) -> None:
    model, rows = tiny.model(kind), labelled(40)
    losses = row_losses(model, rows, 4, max_tokens=max_tokens).rows
    assert sorted(losses) == list(range(40))
    for place, row in enumerate(rows):
        assert losses[place] == pytest.approx(one_by_one(model, row), rel=1e-4)


def test_the_score_is_what_the_evaluations_own_trainer_reports(tmp_path: Path) -> None:
    model, rows = tiny.model(), labelled(12)
    data = Dataset.from_list([{"input_ids": list(row.ids), "labels": list(row.labels)} for row in rows])
    arguments = TrainingArguments(
        output_dir=str(tmp_path), per_device_eval_batch_size=1, report_to="none", use_cpu=True
    )
    theirs = Trainer(model=model, args=arguments, eval_dataset=data).evaluate()["eval_loss"]
    ours = row_losses(model, rows, 4).rows
    assert sum(ours.values()) / len(ours) == pytest.approx(theirs, rel=1e-4)


def test_a_batch_that_does_not_fit_the_memory_is_taken_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows, real, sizes = tiny.model(), labelled(13), held_out.predict, []

    def small(*arguments: Any) -> Any:
        sizes.append(len(arguments[1]))
        if sizes[-1] > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*arguments)

    whole = row_losses(model, rows, 4).rows
    monkeypatch.setattr(held_out, "predict", small)
    assert row_losses(model, rows, 4).rows == pytest.approx(whole, rel=1e-4)
    assert sizes[0] == 13


def test_a_row_that_does_not_fit_by_itself_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*arguments: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(held_out, "predict", never)
    with pytest.raises(torch.OutOfMemoryError):
        row_losses(tiny.model(), labelled(2), 4)


def test_the_kl_is_the_mean_over_the_labels_own_positions_and_leaves_the_losses_alone() -> None:
    model, base, rows = tiny.model(seed=1), tiny.model(seed=2), labelled(9)
    losses = row_losses(model, rows, 4, reference=base, kl=True)
    assert losses.rows == pytest.approx(row_losses(model, rows, 4).rows, rel=1e-4)
    total, tokens = 0.0, 0
    for row in rows:
        ids = torch.tensor([list(row.ids)])
        with torch.no_grad():
            mine = model(input_ids=ids).logits[0].log_softmax(-1)
            theirs = base(input_ids=ids).logits[0].log_softmax(-1)
        places = [at for at, label in enumerate(row.labels) if label != IGNORED]
        apart = (mine.exp() * (mine - theirs)).sum(-1)[places]
        total, tokens = total + float(apart.sum()), tokens + len(places)
    assert losses.kl_tokens == tokens
    assert losses.kl_total / losses.kl_tokens == pytest.approx(total / tokens, rel=1e-4)


def test_scoring_leaves_a_model_in_training_mode_as_it_was() -> None:
    model = tiny.model().train()
    row_losses(model, labelled(3), 4)
    assert model.training
    assert all(weight.requires_grad for weight in model.parameters())


DATASET = DpoDataset(field_prompt="prompt", field_chosen="chosen", field_rejected="rejected")


def pairs(count: int, seed: int = 0) -> list[PairRow]:
    chance = random.Random(seed)

    def some(most: int) -> list[int]:
        return [chance.randrange(5, 400) for _ in range(chance.randint(1, most))]

    return [PairRow(some(20), some(30), some(30)) for _ in range(count)]


def alone(model: Any, prompt: Any, answer: Any) -> float:
    ids = torch.tensor([[*prompt, *answer]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits.float().log_softmax(-1)[0]
    return sum(float(logits[at - 1, ids[0, at]]) for at in range(len(prompt), ids.shape[1]))


@pytest.mark.parametrize("max_tokens", [1, 128, 100_000])
def test_batched_log_probs_are_those_of_every_answer_by_itself(max_tokens: int) -> None:
    model, rows = tiny.model(), pairs(15)
    log_probs = pair_log_probs(model, rows, 4, max_tokens=max_tokens)
    for place, row in enumerate(rows):
        assert log_probs[place].chosen == pytest.approx(alone(model, row.prompt, row.chosen), rel=1e-4)
        assert log_probs[place].rejected == pytest.approx(alone(model, row.prompt, row.rejected), rel=1e-4)


def arguments(folder: Path) -> DPOConfig:
    return DPOConfig(
        output_dir=str(folder),
        per_device_eval_batch_size=1,
        report_to="none",
        use_cpu=True,
        bf16=False,
        beta=0.1,
        max_length=512,
    )


def test_the_score_is_what_trl_reports_for_the_same_rows(tmp_path: Path) -> None:
    """The evaluation of tournaments: strings in, TRL's own loss out."""
    folder = tiny.save(tmp_path / "model")
    tokenizer, data = tiny.tokenizer(adds_begin=True), tiny.pair_rows(12)
    model, base = tiny.model(seed=5), tiny.load(folder)
    theirs = DPOTrainer(
        model=model,
        ref_model=base,
        args=arguments(tmp_path),
        train_dataset=Dataset.from_list(data[:2]),
        eval_dataset=Dataset.from_list(data),
        processing_class=tokenizer,
    ).evaluate()["eval_loss"]
    rows = list(pair_rows(DATASET, data, tokenizer, evaluation_rules(Era.TOURNAMENTS)))
    losses = pair_losses(pair_log_probs(model, rows, 4), pair_log_probs(base, rows, 4))
    assert sum(losses.values()) / len(losses) == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("era", Era)
def test_axolotls_trainer_scores_the_encoded_rows_alike(tmp_path: Path, era: Era) -> None:
    """What training sees during its own evaluations is what we score."""
    folder, rules = tiny.save(tmp_path / "model"), evaluation_rules(era)
    tokenizer, data = tiny.tokenizer(adds_begin=True), tiny.pair_rows(10, length=30)
    rows = [row for one in pair_rows(DATASET, data, tokenizer, rules) if (row := cut_pair(one, rules, 40))]
    table = Dataset.from_list([dict(zip(PAIR_COLUMNS, map(list, row), strict=True)) for row in rows])
    model, base = tiny.model(seed=5), tiny.load(folder)
    theirs = PairTrainer(
        model=model,
        ref_model=base,
        args=arguments(tmp_path),
        train_dataset=table,
        eval_dataset=table,
        processing_class=tokenizer,
    ).evaluate()["eval_loss"]
    losses = pair_losses(pair_log_probs(model, rows, 4), pair_log_probs(base, rows, 4))
    assert sum(losses.values()) / len(losses) == pytest.approx(theirs, rel=1e-4)


def test_a_model_that_learned_nothing_has_a_loss_of_ln_2() -> None:
    log_probs = pair_log_probs(tiny.model(), pairs(4), 4)
    assert list(pair_losses(log_probs, log_probs).values()) == pytest.approx([math.log(2)] * 4)


def test_answers_are_summed_and_not_averaged() -> None:
    model = tiny.model()
    short = PairRow([7, 8], [9], [10])
    long = PairRow([7, 8], [9, 9, 9, 9], [10])
    log_probs = pair_log_probs(model, [short, long], 4)
    assert log_probs[1].chosen < log_probs[0].chosen
