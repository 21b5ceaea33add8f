from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from core.config.files import config_dir
from core.config.yaml_lines import parse_yaml
from core.profile.docs import json_schema, markdown

PAGE = Path(__file__).parents[3] / "docs" / "profiles.md"


def test_the_page_in_docs_is_generated_from_the_schema() -> None:
    page = markdown()
    assert PAGE.read_text(encoding="utf-8") == page, "run: python -m core.profile.docs docs/profiles.md"
    assert "|  |" not in page, "a key without a description"


@pytest.fixture(scope="module")
def validator() -> Any:
    import jsonschema_rs

    return jsonschema_rs.validator_for(json_schema())


@pytest.mark.parametrize("name", sorted(file.name for file in (config_dir() / "profiles").glob("*.yaml")))
def test_the_editor_schema_accepts_the_shipped_profiles(validator: Any, name: str) -> None:
    # With our own reader: YAML 1.1 takes 8e-4 for text.
    data = parse_yaml((config_dir() / "profiles" / name).read_text(), name).data
    for env in [data.get("env", {}), *(s.get("env", {}) for s in data.get("sections", {}).values())]:
        env.update({key: str(value) for key, value in env.items()})
    errors = [str(error) for error in validator.iter_errors(data)]
    assert errors == []


@pytest.mark.parametrize(
    "text", ["targets: {lora_rr: 1}", "limits: {gpu_memory: 75}", "targets: {lora_r: 0}", "nope: 1"]
)
def test_the_editor_schema_rejects_what_we_reject(validator: Any, text: str) -> None:
    assert not validator.is_valid(yaml.safe_load(text))
