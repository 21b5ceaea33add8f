"""A text task from its file to what the engine reads, and everything that can be wrong with it."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from datasets import load_from_disk

from core.domain.evaluation import Era
from core.domain.tasks import GrpoDataset, InstructDataset, RewardFunction, TaskType
from core.runs.run_files import EXIT_OF, RunEnd, TrainerExitCode
from tests.trainer import odd_models, tiny
from tests.trainer.tasks import ROWS, rows_plan, spec
from trainer.errors import BadData, BadModel, BadReward
from trainer.handoff import PreparedRows
from trainer.inputs.tables import read_table
from trainer.inputs.text import (
    EQUAL,
    NO_ANSWER,
    NO_PROMPT,
    TOO_LONG,
    UNKNOWN,
    drop_reason,
    read_task,
    write_task,
)
from trainer.inputs.tokens import (
    IGNORED,
    LabelledRow,
    PairRow,
    PromptRow,
    load_tokenizer,
    model_window,
    pad_token_for_engine,
)
from trainer.rewards import sandbox
from trainer.rewards.sandbox import Rewards
from trainer.rewards.source import REWARD_TABLE

TASKS = (TaskType.INSTRUCT, TaskType.CHAT, TaskType.DPO, TaskType.GRPO)
COLUMNS = {
    TaskType.INSTRUCT: {"input_ids", "attention_mask", "labels"},
    TaskType.CHAT: {"input_ids", "attention_mask", "labels"},
    TaskType.DPO: {"prompt_ids", "chosen_ids", "rejected_ids"},
    TaskType.GRPO: {"prompt", "extra_data"},
}


def prepared(folder: Path, task: TaskType, rows: Any = None, **changes: Any) -> PreparedRows:
    of_run = {key: changes.pop(key) for key in ("era", "dataset", "requested_data") if key in changes}
    run = spec(folder, task, rows, **of_run)
    plan = rows_plan(task, **changes)
    return write_task(read_task(run, load_tokenizer(run.model_path)), plan, folder / "data")


@pytest.mark.parametrize("task", TASKS)
def test_a_task_becomes_tables_of_training_and_held_out_rows(tmp_path: Path, task: TaskType) -> None:
    files = prepared(tmp_path, task)
    assert files.eval_path is not None
    train, held = load_from_disk(str(files.train_path)), load_from_disk(str(files.eval_path))
    assert set(train.column_names) == COLUMNS[task]
    assert (len(train), len(held)) == (files.train_rows, files.eval_rows)
    assert len(held) == 12
    assert len(train) + len(held) + sum(files.dropped.values()) == 120
    assert (files.rewards_dir is not None) is task.generates


@pytest.mark.parametrize("task", TASKS)
def test_the_same_data_give_the_same_files_and_new_data_at_the_old_place_others(
    tmp_path: Path, task: TaskType
) -> None:
    """Axolotl's cache knows data by their path only."""
    first = prepared(tmp_path, task)
    before = (tmp_path / "rows.json").read_bytes()
    stamps = {file: file.stat().st_mtime_ns for file in first.train_path.rglob("*")}
    assert prepared(tmp_path, task) == first
    assert {file: file.stat().st_mtime_ns for file in first.train_path.rglob("*")} == stamps
    assert (tmp_path / "rows.json").read_bytes() == before
    second = prepared(tmp_path, task, json.loads(before)[1:])
    assert second.train_path != first.train_path
    assert second.digest != first.digest


def test_another_evaluation_or_length_is_another_place(tmp_path: Path) -> None:
    places = {
        prepared(tmp_path, TaskType.DPO, era=era, length=length).train_path
        for era in Era
        for length in (8, 40)
    }
    assert len(places) == 4


def test_an_incomplete_folder_is_written_again(tmp_path: Path) -> None:
    files = prepared(tmp_path, TaskType.CHAT)
    (files.train_path.parent / "done.json").unlink()
    next(files.train_path.glob("*.arrow")).write_bytes(b"half")
    assert len(read_table(prepared(tmp_path, TaskType.CHAT).train_path)) == files.train_rows


def test_the_facts_are_the_rows_own(tmp_path: Path) -> None:
    run = spec(tmp_path, TaskType.INSTRUCT)
    task = read_task(run, load_tokenizer(run.model_path))
    longest = max(len(row.ids) for row in task.rows if isinstance(row, LabelledRow))
    assert (task.facts.rows, task.facts.total.max) == (120, longest)
    assert task.limit == tiny.WINDOW // 2


def test_rows_longer_than_the_plan_are_left_out_of_training_but_held_out_rows_are_whole(
    tmp_path: Path,
) -> None:
    files = prepared(tmp_path, TaskType.INSTRUCT, length=20)
    assert files.eval_path is not None
    train, held = read_table(files.train_path), read_table(files.eval_path)
    assert max(len(row.ids) for row in train if isinstance(row, LabelledRow)) <= 20
    assert max(len(row.ids) for row in held if isinstance(row, LabelledRow)) > 20
    assert files.dropped[TOO_LONG] == 120 - len(train) - len(held)


def test_no_row_holds_a_token_that_the_model_has_no_row_for(tmp_path: Path) -> None:
    """transformers adds `<|endoftext|>` to a tokenizer beside a Qwen2 model: here it is plain text, as in
    evaluation. A row that needs another such token is left out, and the others are trained on."""
    tiny.save(tmp_path / "model", "qwen", adds_begin=False)
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert load_tokenizer(str(tmp_path / "model"))("x<|endoftext|>")["input_ids"][-1] < config["vocab_size"]
    marked = {
        TaskType.INSTRUCT: {"instruct": "a", "output": "b <|endoftext|> c"},
        TaskType.CHAT: {
            "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "<|endoftext|>"}]
        },
        TaskType.DPO: {"prompt": "a", "chosen": "b <|endoftext|>", "rejected": "c"},
        TaskType.GRPO: {"prompt": "a <|endoftext|>"},
    }
    for size, lost in ((config["vocab_size"], 0), (config["vocab_size"] - 1, 1)):
        (tmp_path / "model/config.json").write_text(json.dumps({**config, "vocab_size": size}))
        tokenizer = load_tokenizer(str(tmp_path / "model"))
        last = tokenizer.convert_ids_to_tokens(config["vocab_size"] - 1).replace("\u0120", " ")
        for task, row in marked.items():
            rows = [row, json.loads(json.dumps(row).replace("<|endoftext|>", f"a{last}")), row]
            read = read_task(spec(tmp_path, task, rows), tokenizer)
            assert (len(read.rows), read.dropped.get(UNKNOWN, 0)) == (3 - lost, lost)
            ids = [one for row in read.rows if not isinstance(row, PromptRow) for part in row for one in part]
            assert max(ids, default=0) < size


def test_pairs_are_cut_to_the_plan_and_not_left_out(tmp_path: Path) -> None:
    files = prepared(tmp_path, TaskType.DPO, length=12)
    rows = [row for row in read_table(files.train_path) if isinstance(row, PairRow)]
    assert max(len(row.prompt) + max(len(row.chosen), len(row.rejected)) for row in rows) <= 12
    assert files.train_rows + files.eval_rows + sum(files.dropped.values()) == 120


def test_prompts_are_cut_to_the_plan(tmp_path: Path) -> None:
    files = prepared(tmp_path, TaskType.GRPO, prompt_limit=3)
    tokenizer = load_tokenizer(str(tmp_path / "model"))
    rows = [row for row in read_table(files.train_path) if isinstance(row, PromptRow)]
    assert max(len(tokenizer(row.prompt, add_special_tokens=False)["input_ids"]) for row in rows) <= 3
    assert json.loads(str(rows[0].extra)).keys() == {"k"}


def test_a_text_without_an_output_column_is_cut_into_sequences(tmp_path: Path) -> None:
    rows = [{"text": "sum of apples " * 40}] * 3
    files = prepared(
        tmp_path, TaskType.INSTRUCT, rows, dataset=InstructDataset(field_instruction="text"), length=32
    )
    table = [row for row in read_table(files.train_path) if isinstance(row, LabelledRow)]
    assert len(table) > 6
    assert all(list(row.ids) == list(row.labels) and len(row.ids) <= 32 for row in table)


def test_texts_longer_than_evaluation_reads_are_planned_for_in_its_pieces(tmp_path: Path) -> None:
    """Counted whole they were all too long, and the plan was one step."""
    rows = [{"text": tiny.sentence(random.Random(place), 400)} for place in range(20)]
    run = spec(tmp_path, TaskType.INSTRUCT, rows, dataset=InstructDataset(field_instruction="text"))
    read = read_task(run, load_tokenizer(run.model_path))
    assert read.limit == 256
    assert read.facts.rows == len(read.rows) == 40
    assert read.facts.total.quantiles[-1] <= 256
    assert len(set(read.fingerprints)) == len(read.rows)


def test_a_row_whose_only_label_is_its_first_token_is_left_out() -> None:
    assert drop_reason(LabelledRow([7, 8], [7, IGNORED]), 10, False) is not None
    assert drop_reason(LabelledRow([7, 8], [IGNORED, 8]), 10, False) is None


def test_where_no_row_is_short_enough_evaluation_looks_further(tmp_path: Path) -> None:
    """The window is 512: rows of up to 256 tokens are scored, unless there are none."""
    long = [{"instruct": "sum " * 290, "input": "", "output": "the end"}] * 8
    run = spec(tmp_path, TaskType.INSTRUCT, long)
    task = read_task(run, load_tokenizer(run.model_path))
    assert (len(task.rows), task.limit) == (8, 512)


@pytest.mark.parametrize("task", TASKS)
def test_a_single_row_is_trained_on_with_none_held_out(tmp_path: Path, task: TaskType) -> None:
    files = prepared(tmp_path, task, ROWS[task](1))
    assert (files.train_rows, files.eval_rows, files.eval_path) == (1, 0, None)


ODD = "emoji \U0001f600\u200d, nul \0, half \ud83d, {brace, 日本語, \r\n\t"


@pytest.mark.parametrize("task", TASKS)
def test_odd_texts_are_trained_on_as_they_are(tmp_path: Path, task: TaskType) -> None:
    rows = {
        TaskType.INSTRUCT: {"instruct": ODD, "input": ODD, "output": ODD},
        TaskType.CHAT: {"conversations": [{"from": "human", "value": ODD}, {"from": "gpt", "value": ODD}]},
        TaskType.DPO: {"prompt": ODD, "chosen": ODD, "rejected": ODD + "!"},
        TaskType.GRPO: {"prompt": ODD, "extra_data": ODD},
    }
    files = prepared(tmp_path, task, [rows[task]] * 3)
    assert files.train_rows == 3
    assert len(read_table(files.train_path)) == 3


BAD_ROWS: dict[str, tuple[TaskType, Any, str]] = {
    "no rows": (TaskType.INSTRUCT, [], "empty"),
    "no json": (TaskType.INSTRUCT, "nonsense", "cannot be read"),
    "wrong columns": (TaskType.INSTRUCT, [{"q": "a", "a": "b"}], "field_instruction"),
    "no answers": (TaskType.INSTRUCT, [{"instruct": "a", "input": "", "output": None}] * 9, NO_ANSWER),
    "all too long": (
        TaskType.INSTRUCT,
        [{"instruct": "sum " * 900, "input": "", "output": "x"}] * 9,
        TOO_LONG,
    ),
    "no conversations": (TaskType.CHAT, [{"conversations": None}] * 9, NO_ANSWER),
    "nobody answers": (TaskType.CHAT, [{"conversations": [{"from": "human", "value": "x"}]}] * 9, NO_ANSWER),
    "wrong chat column": (TaskType.CHAT, [{"messages": []}], "chat_column"),
    "equal answers": (TaskType.DPO, [{"prompt": "p", "chosen": "c", "rejected": "c"}] * 9, EQUAL),
    "wrong pair columns": (TaskType.DPO, [{"prompt": "p", "good": "c"}], "field_chosen"),
    "blank prompts": (TaskType.GRPO, [{"prompt": "  "}] * 9, NO_PROMPT),
    "wrong prompt column": (TaskType.GRPO, [{"text": "p"}], "field_prompt"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_data_that_nothing_can_be_learned_from_end_the_run_with_a_reason(tmp_path: Path, name: str) -> None:
    task, rows, reason = BAD_ROWS[name]
    with pytest.raises(BadData, match=reason) as raised:
        prepared(tmp_path, task, rows)
    assert raised.value.end is RunEnd.BAD_DATA
    assert EXIT_OF[raised.value.end] is TrainerExitCode.BAD_DATA


def test_a_few_bad_rows_are_left_out_and_counted(tmp_path: Path) -> None:
    bad = [{"prompt": "p", "chosen": "c", "rejected": "c"}] * 4
    files = prepared(tmp_path, TaskType.DPO, [*tiny.pair_rows(50), *bad])
    assert files.dropped == {EQUAL: 4}


def test_a_plan_too_short_for_every_row_is_bad_data(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="4 tokens long"):
        prepared(tmp_path, TaskType.CHAT, length=4)


def rewarded(*sources: str) -> GrpoDataset:
    functions = [RewardFunction(reward_func=source, reward_weight=1) for source in sources]
    return GrpoDataset(field_prompt="prompt", reward_functions=functions)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def f(completions:", "no Python"),
        ("def f(completions): return [1]", "returned 1 rewards for 5"),
        ("import no_such_module\ndef f(completions): ...", "imports no_such_module, which is not installed"),
    ],
)
def test_rewards_of_which_none_works_end_the_run_with_a_reason(
    tmp_path: Path, source: str, reason: str
) -> None:
    with pytest.raises(BadReward, match=reason) as raised:
        prepared(tmp_path, TaskType.GRPO, dataset=rewarded(source))
    assert raised.value.end is RunEnd.BAD_REWARD


ENDLESS = "def f(completions):\n    import time\n    time.sleep(3600)  # endless"


@pytest.fixture
def waited_for(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Functions that never come back, as often as they were called, with little time for each. Others have
    what a busy machine needs."""
    waited: list[str] = []
    request = sandbox.RewardProcess.request

    def soon(self: sandbox.RewardProcess, question: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        if question.get("source") != ENDLESS:
            return request(self, question, seconds)
        waited.append(ENDLESS)
        return request(self, question, 0.3)

    monkeypatch.setattr(sandbox.RewardProcess, "request", soon)
    return waited


def test_an_endless_reward_ends_the_run(tmp_path: Path, waited_for: list[str]) -> None:
    with pytest.raises(BadReward, match="did not come back in time"):
        prepared(tmp_path, TaskType.GRPO, dataset=rewarded(ENDLESS))
    assert waited_for


def test_an_endless_reward_beside_a_good_one_is_waited_for_only_once(
    tmp_path: Path, waited_for: list[str]
) -> None:
    """The training and its evaluations would each give it its minutes, three times over."""
    good = "def f(completions): return [1.0] * len(completions)"
    files = prepared(tmp_path, TaskType.GRPO, dataset=rewarded(good, ENDLESS))
    assert files.rewards_dir is not None
    rewards = Rewards.open(files.rewards_dir / REWARD_TABLE)
    assert rewards.problems(["a"]) == [None, "it did not come back in time before the training"]
    assert rewards.call(1, ["a", "b"]) == [0.0, 0.0]
    assert waited_for == [ENDLESS]
    rewards.close()


def remove_tokenizer(model: Path) -> None:
    for file in model.glob("token*"):
        file.unlink()


@pytest.mark.parametrize(
    ("damage", "lacking"),
    [
        (remove_tokenizer, "tokenizer"),
        (lambda model: (model / "tokenizer.json").write_text("{"), "tokenizer"),
        (lambda model: (model / "config.json").unlink(), "config"),
    ],
)
def test_a_model_without_tokenizer_or_config_ends_the_run_with_a_reason(
    tmp_path: Path, damage: Any, lacking: str
) -> None:
    damage(tiny.save(tmp_path / "model"))
    with pytest.raises(BadModel, match=lacking) as raised:
        prepared(tmp_path, TaskType.CHAT)
    assert raised.value.end is RunEnd.BAD_MODEL


@pytest.mark.parametrize("pad", [None, "<added later>"])
def test_a_tokenizer_without_a_pad_token_that_the_model_knows_is_padded_with_its_end(
    tmp_path: Path, pad: str | None
) -> None:
    """It is masked, and looked up all the same: the first batch of unequal rows would end the run."""
    model = tiny.save(tmp_path / "model")
    unpadded = tiny.tokenizer(pad=False)
    if pad:
        unpadded.add_special_tokens({"pad_token": pad})
    unpadded.save_pretrained(model)
    tokenizer = load_tokenizer(str(model))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    assert pad_token_for_engine(tokenizer) == tiny.TURN
    assert prepared(tmp_path, TaskType.CHAT).train_rows
    assert pad_token_for_engine(tiny.tokenizer()) is None


def test_a_models_window_is_found_by_whatever_name_its_family_has_for_it(tmp_path: Path) -> None:
    """GPT-2 reads 1,024 tokens, so evaluation looks at 512; taken for unknown, a longer row ended the run."""
    odd_models.save(tmp_path / "gpt2", "gpt2")
    assert model_window(str(tmp_path / "gpt2")) == 512
    odd_models.save(tmp_path / "seeing", "seeing")
    assert model_window(str(tmp_path / "seeing")) == 512
    (tmp_path / "config.json").write_text('{"model_type": "unheard of", "max_position_embeddings": 77}')
    assert model_window(str(tmp_path)) == 77
