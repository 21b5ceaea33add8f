"""Writing TOML that the standard library and sd-scripts' old reader both take."""

from __future__ import annotations

import json
import subprocess
import tomllib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.domain.tasks import ImageModelType
from core.recipes.kohya import recipe
from core.recipes.render import render
from tests.core.recipes.cases import image_inputs, image_plan

pytestmark = pytest.mark.training


scalars = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
)
keys = st.from_regex(r"[a-z_][a-z0-9_]{0,20}", fullmatch=True)


@given(st.dictionaries(keys, scalars | st.lists(scalars, max_size=4)))
def test_what_is_written_is_read_back_equal(config: dict[str, Any]) -> None:
    assert tomllib.loads(recipe.dump_toml(config)) == config


@pytest.mark.parametrize(
    ("value", "text"), [(1e-5, "1e-05"), (4e-5, "4e-05"), (1e16, "1e+16"), (0.1, "0.1"), (8.0, "8.0")]
)
def test_a_fraction_always_has_a_point(value: float, text: str) -> None:
    written = recipe.dump_toml({"x": value})
    assert "." in written
    assert float(written.split("=")[1]) == float(text)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, {"a": 1}, b"x"])
def test_what_a_flat_table_cannot_hold_is_refused(value: object) -> None:
    with pytest.raises(TypeError):
        recipe.dump_toml({"x": value})


@pytest.mark.parametrize("kind", [ImageModelType.SDXL, ImageModelType.FLUX])
def test_sd_scripts_own_reader_reads_the_same(training_python: str, kind: ImageModelType) -> None:
    odd = '/run/a "quoted" \\ pathé 火'
    rendered = render(image_plan(kind), image_inputs(kind, output_dir=odd))
    code = "import json, sys, toml; json.dump(toml.loads(sys.stdin.read()), sys.stdout)"
    done = subprocess.run(
        [training_python, "-c", code],
        input=rendered.files["config.toml"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout) == rendered.config
