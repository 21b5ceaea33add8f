from random import Random

import pytest

from core.domain.tasks import TASK_TYPE_OF, DatasetKind, TaskType
from core.domain.wire import MinerTaskOffer, TrainRequestImage, TrainRequestText
from miner.dev import validator
from miner.dev.samples import REWARD_FUNCTIONS, TEXT_DS_SIZE, sample_task
from tests.doubles.each import each

SEEDS = range(40)

#: Every key that a validator's dumped models have, nulls included.
KEYS = {
    TaskType.INSTRUCT: {
        "system_prompt",
        "system_format",
        "field_system",
        "field_instruction",
        "field_input",
        "field_output",
        "format",
        "no_input_format",
        "field",
    },
    TaskType.CHAT: {
        "chat_template",
        "chat_column",
        "chat_role_field",
        "chat_content_field",
        "chat_user_reference",
        "chat_assistant_reference",
    },
    TaskType.DPO: {
        "field_prompt",
        "field_system",
        "field_chosen",
        "field_rejected",
        "prompt_format",
        "chosen_format",
        "rejected_format",
    },
    TaskType.GRPO: {"field_prompt", "reward_functions", "extra_column"},
}


@each("task_type", list(TaskType))
@each("seed", SEEDS)
def test_examples_are_what_the_wire_models_take(task_type: TaskType, seed: int) -> None:
    task = sample_task(task_type, Random(seed))
    offer = MinerTaskOffer.model_validate(task.offer())
    assert offer.task_type is task_type
    assert offer.task_id == task.task_id
    start: TrainRequestText | TrainRequestImage
    if not task_type.is_text:
        start = TrainRequestImage.model_validate(task.start())
    else:
        start = TrainRequestText.model_validate(task.start())
        assert TASK_TYPE_OF[DatasetKind(start.dataset_type.kind)] is task_type
    assert start.expected_repo_name == task.expected_repo_name


@pytest.mark.parametrize("task_type", list(KEYS))
def test_dataset_types_carry_all_their_keys_and_no_other(task_type: TaskType) -> None:
    assert set(sample_task(task_type, Random(1)).start()["dataset_type"]) == KEYS[task_type]


def test_offers_and_starts_have_the_keys_of_the_protocol() -> None:
    text, image = sample_task(TaskType.DPO, Random(1)), sample_task(TaskType.IMAGE, Random(1))
    offer = {"ds_size", "model", "hours_to_complete", "task_id", "task_type", "model_params_count"}
    base = {"model", "task_id", "hours_to_complete", "expected_repo_name"}
    assert set(text.offer()) == set(image.offer()) == offer
    assert set(text.start()) == base | {"dataset", "dataset_type", "file_format"}
    assert set(image.start()) == base | {"dataset_zip", "model_type"}


def test_each_type_goes_to_its_own_path() -> None:
    paths = {kind: sample_task(kind, Random(1)) for kind in TaskType}
    assert {kind: task.offer_path for kind, task in paths.items() if "image" in task.offer_path} == {
        TaskType.IMAGE: "/task_offer_image/"
    }
    assert paths[TaskType.GRPO].start_path == "/start_training_grpo/"
    assert paths[TaskType.IMAGE].start_path == "/start_training_image/"
    assert paths[TaskType.CHAT].start_path == "/start_training/"


def test_the_same_seed_gives_the_same_task_and_another_seed_another() -> None:
    one, same, other = (sample_task(TaskType.GRPO, Random(seed)) for seed in (5, 5, 6))
    assert one == same
    assert one.task_id != other.task_id


def test_examples_of_two_types_with_one_seed_are_two_tasks() -> None:
    ids = {validator.example_task(kind.name.lower(), 1).task_id for kind in TaskType}
    assert len(ids) == len(TaskType)


def test_a_restarted_task_differs_only_in_its_repository() -> None:
    task = sample_task(TaskType.CHAT, Random(5))
    again = task.restarted(Random(6))
    assert again.offer() == task.offer()
    before, after = task.start(), again.start()
    assert before.pop("expected_repo_name") != after.pop("expected_repo_name")
    assert before == after


@each("seed", SEEDS)
def test_values_stay_within_what_validators_send(seed: int) -> None:
    text, image, grpo = (
        sample_task(kind, Random(seed)) for kind in (TaskType.INSTRUCT, TaskType.IMAGE, TaskType.GRPO)
    )
    assert text.ds_size == TEXT_DS_SIZE
    assert 1 <= text.hours <= 6
    assert 1 <= image.hours <= 2
    assert image.ds_size is not None
    assert 10 <= image.ds_size <= 50
    assert grpo.params is not None
    assert 1e9 <= grpo.params <= 12e9
    weights = [reward["reward_weight"] for reward in grpo.start()["dataset_type"]["reward_functions"]]
    assert sum(weights) == pytest.approx(1.0)


@pytest.mark.parametrize("source", REWARD_FUNCTIONS, ids=lambda source: source.split("(")[0][4:])
def test_example_rewards_run_and_give_one_number_per_completion(source: str) -> None:
    scope: dict[str, object] = {}
    exec(source, scope)
    (reward,) = (value for name, value in scope.items() if name.startswith("reward_"))
    scores = reward(["a b, a", "", "word"], prompts=["p"] * 3, extra_data=['{"answer": "word"}', None, ""])  # type: ignore[operator]
    assert len(scores) == 3
    assert all(isinstance(score, float) for score in scores)
