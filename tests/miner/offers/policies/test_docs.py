from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from core.configs import config_dir
from core.layers.lines import parse
from miner.offers.policies.docs import json_schema, markdown
from miner.offers.policies.schema import Experience, Fitting, Policy, Rules, Scoring, Success, Value, Weights
from tests.doubles.each import each

PAGE = Path(__file__).parents[4] / "docs" / "policies.md"


def test_the_page_in_docs_is_the_one_that_the_schema_yields() -> None:
    told = "run: python -m miner.offers.policies.docs docs/policies.md"
    assert PAGE.read_text(encoding="utf-8") == markdown(), told


@each("part", [Policy, Rules, Experience, Fitting, Scoring, Weights, Success, Value])
def test_every_key_is_documented_where_it_is_declared(part: Any) -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name, field in part.model_fields.items():
        assert field.description, name
        assert f"| `{name}` |" in page


@pytest.fixture(scope="module")
def validator() -> Any:
    import jsonschema_rs

    return jsonschema_rs.validator_for(json_schema())


@pytest.mark.parametrize("name", sorted(file.name for file in (config_dir() / "policies").glob("*.yaml")))
def test_an_editor_s_schema_accepts_the_shipped_policies(validator: Any, name: str) -> None:
    data = parse((config_dir() / "policies" / name).read_text(), name).data
    assert [str(error) for error in validator.iter_errors(data)] == []


@pytest.mark.parametrize(
    "text",
    [
        "rules: {max_jobz: 1}",
        "rules: {hours: {poetry: 3}}",
        "fitting: {max_wait: 30}",
        "nope: 1",
        "score: {task: {dpo: 2}}",
    ],
)
def test_an_editor_s_schema_refuses_what_we_refuse(validator: Any, text: str) -> None:
    assert not validator.is_valid(yaml.safe_load(text))


def test_the_schema_is_plain_json() -> None:
    assert json.loads(json.dumps(json_schema()))["additionalProperties"] is False
