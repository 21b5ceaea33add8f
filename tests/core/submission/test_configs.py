from __future__ import annotations

from typing import Any

from core.submission.configs import COMPARED, differences, restored, vocabulary
from core.submission.faults import FaultKind
from tests.core.submission.folders import BASE_CONFIG, SAVED_CONFIG
from tests.doubles.each import each


@each("field", [name for name in COMPARED if name in BASE_CONFIG])
def test_every_field_that_evaluators_compare_must_be_the_bases(field: str) -> None:
    for changed in ({**SAVED_CONFIG, field: "other"}, {k: v for k, v in SAVED_CONFIG.items() if k != field}):
        (found,) = differences(changed, BASE_CONFIG)
        assert found.kind is FaultKind.CONFIG_CHANGED
        assert field in found.where


def test_a_field_that_the_base_does_not_have_may_be_anything() -> None:
    assert not list(
        differences({**SAVED_CONFIG, "n_layer": 7, "head_dim": 3}, {**BASE_CONFIG, "head_dim": None})
    )


def test_the_vocabulary_must_stay_and_the_context_may_only_grow() -> None:
    def kinds(**changes: Any) -> list[FaultKind]:
        return [fault.kind for fault in differences({**SAVED_CONFIG, **changes}, BASE_CONFIG)]

    assert kinds(vocab_size=65) == [FaultKind.VOCABULARY]
    assert kinds(max_position_embeddings=127) == [FaultKind.CONTEXT]
    assert kinds(max_position_embeddings=None) == [FaultKind.CONTEXT]
    assert kinds(max_position_embeddings=256) == []


def test_a_multimodal_models_inner_configuration_is_compared_too() -> None:
    base = {"model_type": "gemma3", "text_config": {"vocab_size": 9, "max_position_embeddings": 100}}
    ours = {"model_type": "gemma3", "text_config": {"vocab_size": 9, "max_position_embeddings": 50}}
    (found,) = differences(ours, base)
    assert found.where == "config.json: text_config.max_position_embeddings"
    assert vocabulary(base) == 9


def test_what_transformers_5_leaves_out_is_put_back_for_older_readers() -> None:
    found = restored(SAVED_CONFIG, BASE_CONFIG)
    assert found["rope_theta"] == 500000.0
    assert found["torch_dtype"] == "bfloat16"
    assert found["rope_parameters"] == SAVED_CONFIG["rope_parameters"]
    assert found["transformers_version"] == "5.16.1"
    assert not list(differences(found, BASE_CONFIG))


def test_a_stretched_context_is_told_to_older_readers_as_it_is_and_not_as_the_bases() -> None:
    rope = {"rope_theta": 1e6, "rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}
    found = restored({**SAVED_CONFIG, "rope_parameters": rope}, {**BASE_CONFIG, "rope_scaling": None})
    assert found["rope_theta"] == 1e6
    assert found["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 128,
    }


def test_nothing_that_the_trained_model_says_is_overruled() -> None:
    ours = {**SAVED_CONFIG, "use_cache": False, "text_config": {"a": 1}}
    found = restored(ours, {**BASE_CONFIG, "use_cache": True, "text_config": {"a": 2, "b": 3}})
    assert found["use_cache"] is False
    assert found["text_config"] == {"a": 1, "b": 3}


def test_code_of_the_base_and_its_quantisation_do_not_come_back() -> None:
    base = {**BASE_CONFIG, "auto_map": {"AutoModel": "x.py"}, "quantization_config": {"bits": 4}}
    assert not restored(SAVED_CONFIG, base).keys() & {"auto_map", "quantization_config"}
