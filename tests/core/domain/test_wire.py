import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

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


def fields_of(error: pytest.ExceptionInfo[ValidationError]) -> set[str]:
    return {".".join(str(part) for part in problem["loc"]) for problem in error.value.errors()}


def test_an_offer_as_validators_send_it_is_parsed() -> None:
    offer = MinerTaskOffer.model_validate(OFFER)
    assert offer.task_type is TaskType.INSTRUCT
    assert offer.hours_to_complete == 4.0
    assert offer.model_params_count == 8030261248


@each("hours", [4, 4.0, 0, 0.75, 10_000])
def test_hours_may_be_whole_or_not(hours: float) -> None:
    assert MinerTaskOffer.model_validate({**OFFER, "hours_to_complete": hours}).hours_to_complete == hours


@each(
    ("field", "value"),
    [
        ("hours_to_complete", float("nan")),
        ("hours_to_complete", -1),
        ("hours_to_complete", 1e9),
        ("hours_to_complete", "4"),
        ("hours_to_complete", True),
        ("hours_to_complete", None),
        ("model_params_count", "8B"),
        ("model_params_count", 10**30),
        ("model_params_count", 1.5),
        ("ds_size", False),
        ("task_type", "EnvironmentTask"),
        ("task_id", "../../etc/passwd"),
        ("task_id", ""),
        ("task_id", "x" * 200),
        ("task_id", "a\n"),
        ("task_id", 7),
        ("model", "../x"),
        ("model", "a/b/c"),
        ("model", "a b"),
        ("model", ""),
    ],
)
def test_a_wrong_value_is_rejected_with_its_field_named(field: str, value: object) -> None:
    with pytest.raises(ValidationError) as error:
        MinerTaskOffer.model_validate({**OFFER, field: value})
    assert fields_of(error) == {field}


def test_counts_may_be_null_or_absent() -> None:
    offer = MinerTaskOffer.model_validate({**OFFER, "ds_size": None, "model_params_count": None})
    assert (offer.ds_size, offer.model_params_count) == (None, None)
    del (short := dict(OFFER))["ds_size"]
    assert MinerTaskOffer.model_validate(short).ds_size is None


def test_fields_of_a_newer_validator_are_ignored() -> None:
    assert MinerTaskOffer.model_validate({**OFFER, "priority": {"x": 1}}).task_id == OFFER["task_id"]
    assert TrainRequestText.model_validate({**START, "use_kl": True}).task_id == START["task_id"]


@each(
    ("field", "value"),
    [
        ("expected_repo_name", "../x"),
        ("expected_repo_name", "a--b"),
        ("expected_repo_name", "x.git"),
        ("expected_repo_name", ""),
        ("expected_repo_name", "x" * 97),
        ("file_format", "parquet"),
        ("dataset", ""),
        ("dataset_type", {}),
        ("dataset_type", {"environment_names": ["othello"]}),
        ("dataset_type", {"reward_functions": [], "field_prompt": "p"}),
        ("dataset_type", {"reward_functions": [{"reward_func": "def f(c): ...", "reward_weight": -1}]}),
        ("dataset_type", {"reward_functions": [{"reward_weight": 1}]}),
    ],
)
def test_a_wrong_start_names_its_field(field: str, value: object) -> None:
    with pytest.raises(ValidationError) as error:
        TrainRequestText.model_validate({**START, field: value})
    assert {name.split(".")[0] for name in fields_of(error)} == {field}


@each(
    "url",
    ["file:///etc/passwd", "ftp://h/x", "/etc/passwd", "http://", "http://[::1", "https://h/a b", "s3://b/k"],
)
def test_a_dataset_that_is_not_an_http_url_is_rejected(url: str) -> None:
    with pytest.raises(ValidationError, match="URL"):
        TrainRequestText.model_validate({**START, "dataset": url})
    with pytest.raises(ValidationError, match="URL"):
        TrainRequestImage.model_validate({**START, "dataset_zip": url})


def test_a_hub_dataset_is_named_like_a_model() -> None:
    ok = TrainRequestText.model_validate({**START, "file_format": "hf", "dataset": "owner/data"})
    assert ok.dataset == "owner/data"
    with pytest.raises(ValidationError):
        TrainRequestText.model_validate({**START, "file_format": "hf", "dataset": "../data"})
    with pytest.raises(ValidationError, match="is named 'owner/name'"):
        TrainRequestText.model_validate({**START, "file_format": "hf", "dataset": "owner/data\n"})


def test_an_image_start_without_a_model_type_means_sdxl() -> None:
    request = {**START, "dataset_zip": "http://h/z.zip"}
    assert TrainRequestImage.model_validate(request).model_type is ImageModelType.SDXL
    assert (
        TrainRequestImage.model_validate({**request, "model_type": "flux"}).model_type is ImageModelType.FLUX
    )


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
