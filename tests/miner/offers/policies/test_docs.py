from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from core.config.files import config_dir
from core.config.yaml_lines import parse_yaml
from miner.offers.policies import schema
from miner.offers.policies.docs import json_schema, markdown

PAGE = Path(__file__).parents[4] / "docs" / "policies.md"


def test_the_page_in_docs_is_the_one_that_the_schema_yields() -> None:
    way = "run: python -m miner.offers.policies.docs docs/policies.md"
    assert PAGE.read_text(encoding="utf-8") == markdown(), way


def test_every_key_is_described_where_it_is_declared_and_stands_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    models = [model for model in vars(schema).values() if isinstance(model, type)]
    for model in models:
        if issubclass(model, BaseModel) and model.__module__ == schema.__name__:
            for name, field in model.model_fields.items():
                assert field.description, name
                assert f"| `{name}` |" in page


@pytest.fixture(scope="module")
def validator() -> Any:
    import jsonschema_rs

    return jsonschema_rs.validator_for(json_schema())


def test_an_editor_s_schema_accepts_the_shipped_policies(validator: Any) -> None:
    for file in (config_dir() / "policies").glob("*.yaml"):
        data = parse_yaml(file.read_text(), file.name).data
        assert [str(error) for error in validator.iter_errors(data)] == []


@pytest.mark.parametrize(
    "text", ["rules: {max_jobz: 1}", "rules: {hours: {poetry: 3}}", "fitting: {max_wait: 30}", "nope: 1"]
)
def test_an_editor_s_schema_refuses_what_we_refuse(validator: Any, text: str) -> None:
    assert not validator.is_valid(yaml.safe_load(text))
