"""Our tables in Axolotl's own hands: what it trains on is what we wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from axolotl.utils.data.rl import prepare_preference_datasets
from axolotl.utils.data.sft import prepare_datasets
from axolotl.utils.dict import DictDefault
from datasets import Dataset

from core.domain.evaluation import Era
from core.domain.tasks import TaskType
from core.recipes.axolotl.data_keys import dataset_keys
from tests.core.recipes.cases import inputs
from tests.trainer.inputs.test_text import prepared
from tests.trainer.tasks import SCORED
from trainer.axolotl.patches import save_few_rows_here
from trainer.inputs.tables import PAIR_COLUMNS, read_table
from trainer.inputs.tokens import LabelledRow, PairRow, PromptRow, load_tokenizer


@pytest.fixture(autouse=True)
def as_in_a_training_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dataset, "save_to_disk", Dataset.save_to_disk)  # put back afterwards
    save_few_rows_here()


def config(folder: Path, task: TaskType, **more: Any) -> Any:
    """As the recipe renders the data, with the few keys that loading reads besides."""
    files = prepared(folder, task)
    run = inputs(task, train_path=str(files.train_path), eval_path=str(files.eval_path), era=Era.OFFERS)
    keys = dataset_keys(SCORED[task], run)
    return DictDefault(
        {
            **keys,
            "base_model": str(folder / "model"),
            "base_model_config": str(folder / "model"),
            "tokenizer_config": str(folder / "model"),
            "dataset_prepared_path": str(folder / "prepared"),
            "sequence_len": 256,
            "micro_batch_size": 2,
            "gradient_accumulation_steps": 1,
            "num_epochs": 1,
            "dataset_num_proc": 1,
            "batch_size": 2,
            "val_set_size": 0,
            "sample_packing_group_size": 1000,
            "sample_packing_bin_size": 50,
            "seed": 42,
            **more,
        }
    ), files


@pytest.mark.parametrize("task", [TaskType.INSTRUCT, TaskType.CHAT])
@pytest.mark.parametrize("packing", [False, True])
def test_labelled_rows_are_trained_on_as_they_are(tmp_path: Path, task: TaskType, packing: bool) -> None:
    settings, files = config(tmp_path, task, sample_packing=packing, eval_sample_packing=False)
    train, held, _, _ = prepare_datasets(settings, load_tokenizer(settings.base_model))
    for rows, path in ((train, files.train_path), (held, files.eval_path)):
        ours = sorted(
            (list(row.ids), list(row.labels)) for row in read_table(path) if isinstance(row, LabelledRow)
        )
        theirs = sorted((list(row["input_ids"]), list(row["labels"])) for row in rows)
        assert theirs == ours


def test_pairs_reach_the_trainer_as_they_are(tmp_path: Path) -> None:
    settings, files = config(tmp_path, TaskType.DPO, rl="dpo")
    train, held = prepare_preference_datasets(settings, load_tokenizer(settings.base_model))
    assert held is not None
    for rows, path in ((train, files.train_path), (held, files.eval_path)):
        ours = [tuple(map(list, row)) for row in read_table(path) if isinstance(row, PairRow)]
        assert sorted(tuple(list(row[name]) for name in PAIR_COLUMNS) for row in rows) == sorted(ours)


def test_prompts_reach_the_trainer_with_what_the_rewards_ask_for(tmp_path: Path) -> None:
    settings, files = config(tmp_path, TaskType.GRPO, rl="grpo")
    train, _ = prepare_preference_datasets(settings, load_tokenizer(settings.base_model))
    ours = [(row.prompt, row.extra) for row in read_table(files.train_path) if isinstance(row, PromptRow)]
    assert sorted((row["prompt"], row["extra_data"]) for row in train) == sorted(ours)
