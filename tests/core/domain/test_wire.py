import json
from contextlib import nullcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from core.domain.tasks import ImageModelType, TaskType
from core.domain.wire import MinerTaskOffer, TrainRequestImage, TrainRequestText
from tests.doubles.each import each

OFFER = {
    "ds_size": 100000,
    "model": "meta-llama/Llama-3.1-8B",
    "hours_to_complete": 4.0,
    "task_id": "0b8e4c9e-2f5f-4a5e-9a53-5d9a0f1f8c11",
    "task_type": "InstructTextTask",
    "model_params_count": 8030261248,
}
START = {
    "model": "meta-llama/Llama-3.1-8B",
    "task_id": "0b8e4c9e-2f5f-4a5e-9a53-5d9a0f1f8c11",
    "hours_to_complete": 4,
    "expected_repo_name": "5d9a0f1f8c11",
    "dataset": "https://storage.example/abc_train_data.json?X-Amz-Signature=00",
    "dataset_type": {"field_instruction": "instruct", "field_output": "output", "field_input": None},
    "file_format": "s3",
}


BAD_REWARDS = ([], [{"reward_func": "def f(c): ...", "reward_weight": -1}], [{"reward_weight": 1}])


def wrong_fields(model: type[BaseModel], request: dict[str, object]) -> set[object]:
    with pytest.raises(ValidationError) as error:
        model.model_validate(request)
    return {problem["loc"][0] for problem in error.value.errors()}


@each("hours", [4, 4.0, 0, 0.75, 10_000])
def test_an_offer_is_parsed_and_its_hours_may_be_whole_or_not(hours: float) -> None:
    offer = MinerTaskOffer.model_validate({**OFFER, "hours_to_complete": hours})
    assert (offer.task_type, offer.model_params_count) == (TaskType.INSTRUCT, 8030261248)
    assert offer.hours_to_complete == hours


@each(
    ("field", "values"),
    [
        ("hours_to_complete", [float("nan"), -1, 1e9, "4", True, None]),
        ("model_params_count", ["8B", 10**30, 1.5]),
        ("ds_size", [False]),
        ("task_type", ["EnvironmentTask"]),
        ("task_id", ["../../etc/passwd", "", "x" * 200, "a\n", 7]),
        ("model", ["../x", "a/b/c", "a b", ""]),
    ],
)
def test_a_wrong_value_is_rejected_with_its_field_named(field: str, values: list[object]) -> None:
    for value in values:
        assert wrong_fields(MinerTaskOffer, {**OFFER, field: value}) == {field}, value


@each("missing", [{"ds_size": None, "model_params_count": None}, {}])
def test_counts_may_be_null_or_absent(missing: dict[str, None]) -> None:
    required = {name: value for name, value in OFFER.items() if name not in ("ds_size", "model_params_count")}
    offer = MinerTaskOffer.model_validate({**required, **missing})
    assert (offer.ds_size, offer.model_params_count) == (None, None)


def test_fields_of_a_newer_validator_are_ignored() -> None:
    assert MinerTaskOffer.model_validate({**OFFER, "priority": {"x": 1}}).task_id == OFFER["task_id"]
    assert TrainRequestText.model_validate({**START, "use_kl": True}).task_id == START["task_id"]


@each(
    ("field", "values"),
    [
        ("expected_repo_name", ["../x", "a--b", "x.git", "", "x" * 97]),
        ("file_format", ["parquet"]),
        ("dataset", [""]),
        ("dataset_type", [{}, {"environment_names": ["othello"]}]),
        ("dataset_type", [{"reward_functions": functions, "field_prompt": "p"} for functions in BAD_REWARDS]),
    ],
)
def test_a_wrong_start_names_its_field(field: str, values: list[object]) -> None:
    for value in values:
        assert wrong_fields(TrainRequestText, {**START, field: value}) == {field}, value


@each(
    "url",
    ["file:///etc/passwd", "ftp://h/x", "/etc/passwd", "http://", "http://[::1", "https://h/a b", "s3://b/k"],
)
def test_a_dataset_that_is_not_an_http_url_is_rejected(url: str) -> None:
    with pytest.raises(ValidationError, match="URL"):
        TrainRequestText.model_validate({**START, "dataset": url})
    with pytest.raises(ValidationError, match="URL"):
        TrainRequestImage.model_validate({**START, "dataset_zip": url})


@each(("name", "problem"), [("../data", "owner/name"), ("owner/data\n", "owner/name"), ("owner/data", None)])
def test_a_hub_dataset_is_named_like_a_model(name: str, problem: str | None) -> None:
    request = {**START, "file_format": "hf", "dataset": name}
    with pytest.raises(ValidationError, match=problem) if problem else nullcontext():
        assert TrainRequestText.model_validate(request).dataset == name


@each(("given", "kind"), [({}, ImageModelType.SDXL), ({"model_type": "flux"}, ImageModelType.FLUX)])
def test_an_image_start_without_a_model_type_means_sdxl(given: dict[str, str], kind: ImageModelType) -> None:
    request = {**START, "dataset_zip": "http://h/z.zip", **given}
    assert TrainRequestImage.model_validate(request).model_type is kind


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=20), inner, max_size=4),
    max_leaves=12,
)


@given(field=st.sampled_from(sorted({*OFFER, *START})), value=json_values)
def test_any_json_in_any_field_is_accepted_or_rejected(field: str, value: object) -> None:
    for model, good in ((MinerTaskOffer, OFFER), (TrainRequestText, START)):
        try:
            taken = model.model_validate({**good, field: value})
        except ValidationError:
            continue
        assert "/" not in taken.task_id
        assert 0 <= taken.hours_to_complete <= 10_000
        json.loads(taken.model_dump_json())
