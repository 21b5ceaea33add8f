from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from core.configs import config_dir
from core.layers.lines import parse
from core.profile.docs import json_schema, markdown
from core.profile.schema import EngineConfigs, Profile, Section, When
from core.profile.targets import ContainerTargets, Lane, Limits, Scale, Targets
from tests.doubles.each import each

PAGE = Path(__file__).parents[3] / "docs" / "profiles.md"


def test_the_page_in_docs_is_the_one_that_the_schema_yields() -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(), "run: python -m core.profile.docs docs/profiles.md"


@each("part", [Profile, Section, When, Targets, Limits, ContainerTargets, Scale, Lane, EngineConfigs])
def test_every_key_is_documented_where_it_is_declared(part: Any) -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name, field in part.model_fields.items():
        assert field.description, name
        assert f"| `{field.alias or name}` |" in page


@pytest.fixture(scope="module")
def validator() -> Any:
    import jsonschema_rs

    return jsonschema_rs.validator_for(json_schema())


@pytest.mark.parametrize("name", sorted(file.name for file in (config_dir() / "profiles").glob("*.yaml")))
def test_an_editor_s_schema_accepts_the_shipped_profiles(validator: Any, name: str) -> None:
    # With our own reader: YAML 1.1 takes 8e-4 for text.
    data = parse((config_dir() / "profiles" / name).read_text(), name).data
    for env in [data.get("env", {}), *(s.get("env", {}) for s in data.get("sections", {}).values())]:
        env.update({key: str(value) for key, value in env.items()})
    errors = [str(error) for error in validator.iter_errors(data)]
    assert errors == []


@pytest.mark.parametrize(
    "text", ["targets: {lora_rr: 1}", "limits: {gpu_memory: 75}", "targets: {lora_r: 0}", "nope: 1"]
)
def test_an_editor_s_schema_refuses_what_we_refuse(validator: Any, text: str) -> None:
    assert not validator.is_valid(yaml.safe_load(text))


def test_the_schema_is_plain_json() -> None:
    assert json.loads(json.dumps(json_schema()))["additionalProperties"] is False
