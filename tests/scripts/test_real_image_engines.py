"""The parts of `real_image_engines.sh` that need no engine: what is rendered, key checks, and the table."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts" / "real_image_engines"


@pytest.fixture
def part(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import one of the script's parts as it is run: beside the others."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(SCRIPTS) in str(sys.modules[name].__file__):
            del sys.modules[name]


def test_every_family_and_engine_has_configurations_for_the_profiles_and_the_choices(
    part: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configurations = part("configurations")
    monkeypatch.setattr(configurations, "CHOICES", {"huber": configurations.CHOICES["huber"]})
    monkeypatch.setattr(configurations, "profile_files", lambda: {"steady": Path()})
    found = list(configurations.cases(tmp_path))
    pairs = {(case.engine, case.family) for case in found}
    families = configurations.IMAGE_FAMILIES
    assert pairs == {(engine, family) for family, record in families.items() for engine in record.engines}
    assert len({case.text for case in found}) == len(found)
    assert {case.name.split(".")[0] for case in found} >= {"huber", "steady-4xH100"}
    for case in found:
        parsed = tomllib.loads(case.text) if case.file.endswith("toml") else yaml.safe_load(case.text)
        assert parsed, case.name


def test_keys_are_read_out_of_a_constructors_source(part: Any) -> None:
    source = """
    self.lr = kwargs.get('lr', 1e-6)
    self.steps: int = kwargs.pop(
        "steps", 1)
    if 'old' in kwargs: self.new = kwargs['older']
    """
    assert part("toolkit_configurations").known_keys(source) == {"lr", "steps", "old", "older"}


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("lora_te1_text_model_encoder_layers_0_mlp_fc1.alpha", "lora_te1"),
        ("lora_unet_double_blocks_0_img_attn_proj.lora_down.weight", "lora_unet"),
        ("diffusion_model.layers.0.attention.to_k.lora_A.weight", "diffusion_model.layers"),
    ],
)
def test_an_adapters_keys_are_shown_by_what_the_evaluation_goes_by(part: Any, name: str, prefix: str) -> None:
    assert part("each").key_prefix(name) == prefix


@pytest.mark.process
def test_one_attempt_that_fails_or_leaves_does_not_end_the_others(part: Any, tmp_path: Path) -> None:
    each = part("each")
    for name in ("a", "b", "c", "of-the-other"):
        engine = "other" if name == "of-the-other" else "kohya"
        (tmp_path / name).mkdir()
        record = {"name": name, "engine": engine, "family": "flux"}
        (tmp_path / name / "case.json").write_text(json.dumps(record), encoding="utf-8")
    # In a process of its own: it forks.
    code = """
import sys
from pathlib import Path
import each

def attempt(folder, case, scratch):
    print("of the engine")
    if case["name"] == "a":
        raise ValueError("unknown keys: x")
    if case["name"] == "b":
        sys.exit(3)
    return "lora_unet"

sys.exit(each.run_each("kohya", Path(sys.argv[1]), attempt))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=SCRIPTS, capture_output=True, text=True, check=False
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 1, done.stderr
    assert [(result["name"], result["ok"]) for result in results] == [("a", False), ("b", False), ("c", True)]
    assert results[0]["said"] == "ValueError: unknown keys: x"
    assert results[2]["said"] == "lora_unet"
    assert (tmp_path / "c" / "log").read_text("utf-8") == "of the engine\n"
    assert each.LIMIT_S > 0


RECORDS = [
    {"name": "huber.kohya.flux", "engine": "kohya", "family": "flux", "ok": False, "said": "unknown keys: x"},
    {"name": "l1.kohya.flux", "engine": "kohya", "family": "flux", "ok": True, "said": "lora_unet"},
    {"name": "trained", "engine": "kohya", "family": "flux", "ok": True, "said": "lora_unet"},
]


def test_the_table_counts_and_a_failure_is_shown_in_full(
    part: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, path = part("table"), tmp_path / "records.jsonl"
    records = [{**record, "seconds": 12.4, "peak_bytes": 700_000_000} for record in RECORDS]
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    assert table.main(str(path)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["kohya", "flux", "1/2", "yes", "12", "700", "lora_unet"]
    assert lines[2] == "failed: huber.kohya.flux (kohya, flux): unknown keys: x"
    path.write_text(json.dumps(records[1]), encoding="utf-8")
    assert table.main(str(path)) == 0
    path.write_text("", encoding="utf-8")
    assert table.main(str(path)) == 1


@pytest.mark.process
def test_the_script_says_what_it_wants(tmp_path: Path) -> None:
    script = ROOT / "scripts" / "real_image_engines.sh"
    for arguments in ([], [str(tmp_path)], ["--unknown"]):
        done = subprocess.run([script, *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "SD_SCRIPTS AI_TOOLKIT" in done.stderr
    done = subprocess.run([script, tmp_path, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "is this the checkout?" in done.stderr
