from __future__ import annotations

import pytest

from miner.dashboard.yaml_text import insert_key


@pytest.mark.parametrize(
    ("text", "path", "expected", "line"),
    [
        ("extends: base\n", "targets.lora_r", "extends: base\ntargets:\n  lora_r: \n", 3),
        (
            "targets:\n  a: 1\n\nlimits:\n  b: 2\n",
            "targets.c",
            "targets:\n  a: 1\n  c: \n\nlimits:\n  b: 2\n",
            3,
        ),
        ("targets:\n    a: 1\n", "targets.c", "targets:\n    a: 1\n    c: \n", 3),
        ("rules: {}\n", "rules.*.when", "rules:\n  my-name:\n    when: \n", 3),
        ("rules:\n  hot:\n    off: no\n", "rules.*.for", "rules:\n  hot:\n    off: no\n    for: \n", 4),
        ("targets:\n  a: 1\n", "targets.a", "targets:\n  a: 1\n", 2),
        ("", "extends", "extends: \n", 1),
    ],
)
def test_a_key_is_inserted_where_it_belongs(text: str, path: str, expected: str, line: int) -> None:
    assert insert_key(text, path) == (expected, line)
