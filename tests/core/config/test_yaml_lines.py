from __future__ import annotations

import contextlib

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from core.config.yaml_lines import MAX_BYTES, KeyPath, parse_yaml
from core.domain.errors import ConfigError
from tests.doubles.each import each


@pytest.fixture(params=["as built", "pure Python"])
def _both_readers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyYAML comes with and without libyaml."""
    if request.param == "pure Python":
        monkeypatch.setattr("core.config.yaml_lines._LOADER", yaml.SafeLoader)


@pytest.mark.usefixtures("_both_readers")
def test_every_key_and_item_has_its_line() -> None:
    located = parse_yaml("a: 1\nb:\n  c: x\n  d:\n    - 1\n    - e: 2\n", "p.yaml")
    assert located.data == {"a": 1, "b": {"c": "x", "d": [1, {"e": 2}]}}
    assert located.lines[("b", "d", 1, "e")] == 6
    assert located.location(("b", "c")) == "p.yaml:3: b.c"
    assert located.location(("b", "missing")) == "p.yaml:2: b.missing"
    assert located.location(()) == "p.yaml"


@each(
    ("text", "value"),
    [
        ("8e-4", 0.0008),
        ("4.0e-5", 4e-5),
        (".5", 0.5),
        ("-3", -3),
        ("0-63", "0-63"),
        ("5-10", "5-10"),
        ("1:30", "1:30"),
        ("2026-01-01", "2026-01-01"),
        ("0x10", "0x10"),
        ("yes", True),
        ("Off", False),
        ("~", None),
        ("", None),
        ("'8'", "8"),
        ("'yes'", "yes"),
        ("9" * 400, "9" * 400),
        ("!!python/object/apply:os.system [x]", ["x"]),
        ("75GB", "75GB"),
    ],
)
def test_scalars_mean_what_people_expect(text: str, value: object) -> None:
    assert parse_yaml(f"a: {text}", "p.yaml").data == {"a": value}


@each(
    ("text", "expected"),
    [
        ("a: 1\na: 2", "p.yaml:2: a: written twice, first in line 1"),
        ("a: &x 1\nb: *x", "p.yaml:1: anchors and aliases"),
        ("a: &a [x]\n" + "\n".join(f"k{n}: &k{n} [*a, *a]" for n in range(30)), "anchors and aliases"),
        ("a: [1", ": not YAML"),
        ("a:\n\t- 1", "p.yaml:2: not YAML"),
        ("? [a]\n: 1", "a key is a word"),
        ("a: 1\n---\nb: 2", "not YAML"),
        ("\x00", "not YAML"),
        ("[" * 40 + "]" * 40, "nested deeper than 16"),
        ("a: b\n" * (MAX_BYTES // 4), "at most"),
    ],
)
@pytest.mark.usefixtures("_both_readers")
def test_invalid_yaml_is_reported_with_its_line(text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "p.yaml")
    assert expected in str(caught.value)


@given(st.text(max_size=300))
def test_any_text_is_data_or_a_config_error(text: str) -> None:
    lines: dict[KeyPath, int] = {}
    with contextlib.suppress(ConfigError):
        lines = parse_yaml(text, "p.yaml").lines
    assert all(line >= 1 for line in lines.values())
