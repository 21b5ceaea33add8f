from random import Random

import pytest

from core.domain.tasks import OFFERED_TASKS, TASK_TYPE_OF, DatasetKind, TaskType
from core.domain.wire import MinerTaskOffer, TrainRequestImage, TrainRequestText
from miner.dev.samples import REWARD_FUNCTIONS, TEXT_DS_SIZE, example_task, sample_task
from tests.doubles.each import each

SEEDS = range(40)

#: Every key that a validator's dumped models have, nulls included.
KEYS = {
    TaskType.INSTRUCT: "system_prompt system_format field_system field_instruction field_input field_output "
    "format no_input_format field",
    TaskType.CHAT: "chat_template chat_column chat_role_field chat_content_field chat_user_reference "
    "chat_assistant_reference",
    TaskType.DPO: "field_prompt field_system field_chosen field_rejected prompt_format chosen_format "
    "rejected_format",
    TaskType.GRPO: "field_prompt reward_functions extra_column",
}


@each("task_type", OFFERED_TASKS)
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


def test_offers_starts_and_dataset_types_have_the_keys_of_the_protocol() -> None:
    for task_type, keys in KEYS.items():
        assert set(sample_task(task_type, Random(1)).start()["dataset_type"]) == set(keys.split())
    text, image = sample_task(TaskType.DPO, Random(1)), sample_task(TaskType.IMAGE, Random(1))
    offer = {"ds_size", "model", "hours_to_complete", "task_id", "task_type", "model_params_count"}
    base = {"model", "task_id", "hours_to_complete", "expected_repo_name"}
    assert set(text.offer()) == set(image.offer()) == offer
    assert set(text.start()) == base | {"dataset", "dataset_type", "file_format"}
    assert set(image.start()) == base | {"dataset_zip", "model_type"}


def test_type_and_seed_name_a_task() -> None:
    tasks = [example_task(kind.name.lower(), seed) for kind in OFFERED_TASKS for seed in (5, 6)]
    assert len({task.task_id for task in tasks}) == len(tasks)
    assert tasks[0] == example_task(OFFERED_TASKS[0].name.lower(), 5)


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
