from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from core.submission.faults import FaultKind
from core.submission.folder import SubmissionKind
from core.submission.metadata import (
    COMPARED,
    card_fault,
    config_faults,
    licence_of,
    model_card,
    restored_config,
    vocabulary_rows,
)
from tests.core.submission.folders import BASE_CONFIG, SAVED_CONFIG
from tests.doubles.each import each


@each("field", [name for name in COMPARED if name in BASE_CONFIG])
def test_every_field_that_evaluators_compare_must_be_the_bases(field: str) -> None:
    for changed in ({**SAVED_CONFIG, field: "other"}, {k: v for k, v in SAVED_CONFIG.items() if k != field}):
        (fault,) = config_faults(changed, BASE_CONFIG)
        assert fault.kind is FaultKind.CONFIG_CHANGED
        assert field in fault.where


@each(
    ("ours", "base", "kinds"),
    [
        ({"n_layer": 7, "head_dim": 3}, {"head_dim": None}, []),  # the base does not have them
        ({"vocab_size": 65}, {}, [FaultKind.VOCABULARY]),
        ({"max_position_embeddings": 127}, {}, [FaultKind.CONTEXT]),
        ({"max_position_embeddings": None}, {}, [FaultKind.CONTEXT]),
        ({"max_position_embeddings": 256}, {}, []),
    ],
)
def test_the_vocabulary_must_stay_and_the_context_may_only_grow(
    ours: dict[str, Any], base: dict[str, Any], kinds: list[FaultKind]
) -> None:
    faults = config_faults({**SAVED_CONFIG, **ours}, {**BASE_CONFIG, **base})
    assert [fault.kind for fault in faults] == kinds


def test_a_multimodal_models_inner_configuration_is_compared_too() -> None:
    base = {"model_type": "gemma3", "text_config": {"vocab_size": 9, "max_position_embeddings": 100}}
    ours = {"model_type": "gemma3", "text_config": {"vocab_size": 9, "max_position_embeddings": 50}}
    (fault,) = config_faults(ours, base)
    assert fault.where == "config.json: text_config.max_position_embeddings"
    assert vocabulary_rows(base) == 9


def test_what_transformers_5_leaves_out_is_put_back_for_older_readers() -> None:
    restored = restored_config(SAVED_CONFIG, BASE_CONFIG)
    assert (restored["rope_theta"], restored["torch_dtype"]) == (500000.0, "bfloat16")
    assert restored["rope_parameters"] == SAVED_CONFIG["rope_parameters"]
    assert restored["transformers_version"] == "5.16.1"
    assert not list(config_faults(restored, BASE_CONFIG))


def test_older_readers_see_a_stretched_context_and_not_the_bases() -> None:
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}
    ours = {**SAVED_CONFIG, "rope_parameters": {"rope_theta": 1e6, **scaling}}
    restored = restored_config(ours, {**BASE_CONFIG, "rope_scaling": None})
    assert (restored["rope_theta"], restored["rope_scaling"]) == (1e6, scaling)


def test_no_key_of_the_trained_model_is_overruled_and_no_code_or_quantisation_comes_back() -> None:
    ours = {**SAVED_CONFIG, "use_cache": False, "text_config": {"a": 1}}
    odd = {"auto_map": {"AutoModel": "x.py"}, "quantization_config": {"bits": 4}}
    base = {**BASE_CONFIG, **odd, "use_cache": True, "text_config": {"a": 2, "b": 3}}
    restored = restored_config(ours, base)
    assert (restored["use_cache"], restored["text_config"]) == (False, {"a": 1, "b": 3})
    assert not restored.keys() & odd.keys()


def front(content: bytes) -> dict[str, object]:
    return dict(yaml.safe_load(content.decode().split("---\n")[1]))


@each("kind", list(SubmissionKind))
def test_our_card_names_the_real_base_and_has_no_fault(kind: SubmissionKind) -> None:
    card = model_card(kind, "owner/Model-1.5B", {"license": "apache-2.0"})
    expected = {"base_model": "owner/Model-1.5B", "license": "apache-2.0"}
    assert expected.items() <= front(card).items()
    assert card_fault(card, "owner/Model-1.5B") is None
    # A name that the hub would not take stays out of the front matter.
    assert "base_model" not in front(model_card(kind, "/cache/models/x"))


@each(
    ("text", "expected"),
    [
        ("---\nbase_model: /cache/models/x\n---\n", "the hub's name of the base model"),
        ("---\nbase_model: other/model\n---\n", "must be a/b"),
        ("---\nbase_model: [a/b, ./x]\n---\n", "the hub's name"),
        ("---\nlicense: apache-2.0\n---\n", "must be a/b"),
        ("---\nbase_model: a/b\nlicense: [mit]\n---\n", "one of the hub's short names"),
        ("---\nbase_model: a: b\n---\n", "is not valid YAML"),
        ("---\n- a\n---\n", "keys and values"),
        ("---\na: &a [x]\nb: *a\n---\n", "aliases"),
        ("---\n" + "x: 1\n" * 10_000 + "---\n", "longer than"),
        ("---\n" + "[" * 5000 + "\n---\n", "is not valid YAML"),
        *(
            (f"---\na: {odd}\n---\n", "do not match")
            for odd in ("!!timestamp x", "!!bool x", "!!int ''", "!!float ''")
        ),
        ("---\na: !!python/object/apply:os.system [id]\n---\n", "is not valid YAML"),
    ],
)
def test_a_card_that_the_hub_would_refuse_is_a_fault(text: str, expected: str) -> None:
    fault = card_fault(text.encode(), "a/b")
    assert fault is not None
    assert expected in str(fault)


def test_a_card_with_windows_line_ends_or_without_a_known_base_is_accepted() -> None:
    assert card_fault(b"---\r\nbase_model: a/b\r\nlicense: mit\r\n---\r\nText\r\n", "a/b") is None
    assert card_fault(b"# Just a title\n", None) is None


@given(st.text() | st.text().map(lambda text: f"---\n{text}\n---\n"))
def test_any_text_is_checked_without_a_traceback(text: str) -> None:
    fault = card_fault(text.encode("utf-8", "surrogatepass"), "a/b")
    assert fault is None or str(fault).isprintable()


def test_the_bases_licence_is_passed_on_as_far_as_it_is_one(tmp_path: Path) -> None:
    def licence(text: str) -> dict[str, str]:
        (tmp_path / "README.md").write_text(f"---\n{text}\n---\n")
        return licence_of(tmp_path)

    assert licence("license: other\nlicense_name: x-1\nlicense_link: https://example.org/l") == {
        "license": "other",
        "license_name": "x-1",
        "license_link": "https://example.org/l",
    }
    assert licence("license: llama3.1\nlicense_link: LICENSE") == {"license": "llama3.1"}
    assert licence("license: [a, b]") == {}
    assert licence("license: 'x\\ny: z'") == {}
    assert licence("license: mit\na: !!bool perhaps") == {}
    (tmp_path / "README.md").unlink()
    assert licence_of(tmp_path) == {}
