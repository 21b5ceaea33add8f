"""The operator's files: read with their origins, and written only where they are the operator's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from core.config.files import config_dir
from core.domain.hardware import Hardware, parse_gpus
from miner.api.config_files import EffectiveValue, FileKind
from miner.config_files.files import (
    ConfigFiles,
    NoSuchFile,
    NotWritable,
    StaleFile,
    effective_yaml,
    text_digest,
)
from miner.offers.policy_runtime import PolicyRuntime
from miner.settings import load_settings
from tests.doubles.each import each

PROFILES, POLICIES = FileKind.PROFILES, FileKind.POLICIES
TEXT = "extends: h100x4\ntargets:\n  lora_r: 64\n"


def opened(folder: Path, **env: str) -> ConfigFiles:
    settings = load_settings(env={"DATA_DIR": str(folder), **env}, env_file=None)
    runtime = PolicyRuntime(settings, lambda *_: None)
    runtime.refresh(Hardware(gpus=parse_gpus("4xH100")))
    return ConfigFiles(settings, runtime)


def entries(files: ConfigFiles) -> dict[tuple[str, str], Any]:
    return {(one.kind, one.name): one for one in files.overview().files}


def test_the_list_says_whose_a_file_is_and_what_is_in_force(tmp_path: Path) -> None:
    files = opened(tmp_path)
    found = entries(files)
    assert found["profiles", "h100x4"].in_force
    assert not found["profiles", "h100x4"].writable
    assert found["profiles", "base"].used_by == "h100x4"
    assert found["policies", "h100x4"].description
    files.save(POLICIES, "bad", "rules: {nothing: 1}\n", "")
    assert "nearest" in entries(files)["policies", "bad"].problem


def test_what_is_no_file_is_not_listed_and_hides_no_shipped_one(tmp_path: Path) -> None:
    files = opened(tmp_path)
    (tmp_path / "policies" / "old.yaml").mkdir(parents=True)
    (tmp_path / "policies" / "h100x4.yaml").symlink_to(tmp_path / "nowhere.yaml")
    found = entries(files)
    assert ("policies", "old") not in found
    assert not found["policies", "h100x4"].own


def test_a_shipped_file_is_changed_by_one_of_the_operators_that_extends_it(tmp_path: Path) -> None:
    files = opened(tmp_path)
    shipped = files.show(PROFILES, "h100x4")
    assert (shipped.own, shipped.digest) == (False, "")
    assert yaml.safe_load(shipped.draft)["extends"] == "h100x4"
    files.save(PROFILES, "h100x4", TEXT, "")
    mine = opened(tmp_path).show(PROFILES, "h100x4")
    assert (mine.own, mine.in_force, mine.text) == (True, True, TEXT)
    values = {one.path: one for one in mine.effective}
    assert values["targets.lora_r"].value == "64"
    assert values["targets.lora_r"].origin == "h100x4.yaml:3"
    assert "# base.yaml:" in mine.effective_yaml


def test_alert_rules_are_one_file_that_lies_over_the_shipped_one(tmp_path: Path) -> None:
    files = opened(tmp_path)
    shipped = files.show(FileKind.ALERTS, "alerts")
    assert (shipped.own, shipped.digest) == (False, "")
    files.save(FileKind.ALERTS, "alerts", "rules: {gpu-memory: {when: {above: 95%}}}\n", "")
    assert (tmp_path / "alerts.yaml").exists()
    origins = {one.path: one.origin for one in files.show(FileKind.ALERTS, "alerts").effective}
    assert origins["rules.gpu-memory.when.above"] == "alerts.yaml:1"
    with pytest.raises(NoSuchFile):
        files.show(FileKind.ALERTS, "others")


def test_every_key_is_listed_with_what_it_means(tmp_path: Path) -> None:
    keys = {one.path: one for one in opened(tmp_path).show(PROFILES, "h100x4").keys}
    assert keys["limits.reserve"].default == "10m"
    assert keys["sections.*.targets.lora_r"].description


def test_values_of_a_profile_are_for_the_task_and_model_that_is_asked_for(tmp_path: Path) -> None:
    files = opened(tmp_path)
    one, other = (files.show(PROFILES, "h100x4", name) for name in ("instruct Llama-8B", "image flux"))
    assert one.effective != other.effective
    assert "image flux" in one.subjects
    with pytest.raises(NoSuchFile):
        files.show(PROFILES, "h100x4", "nothing")


def test_a_policy_shows_what_the_settings_change_in_it(tmp_path: Path) -> None:
    found = opened(tmp_path, MAX_HOURS="5").show(POLICIES, "h100x4")
    assert EffectiveValue(path="rules.max_hours", value=5.0, origin="set") in found.effective


def test_a_save_replaces_what_the_editor_began_with_and_keeps_it_beside(tmp_path: Path) -> None:
    files = opened(tmp_path)
    files.save(PROFILES, "mine", TEXT, "")
    path = tmp_path / "profiles/mine.yaml"
    path.chmod(0o640)
    files.save(PROFILES, "mine", TEXT + "# more\n", text_digest(TEXT))
    assert (path.read_text(), path.stat().st_mode & 0o777) == (TEXT + "# more\n", 0o640)
    assert (tmp_path / "profiles/mine.yaml.bak").read_text() == TEXT
    for digest in ("", text_digest(TEXT)):
        with pytest.raises(StaleFile, match="load it again"):
            files.save(PROFILES, "mine", TEXT, digest)
    path.unlink()
    with pytest.raises(StaleFile, match="is gone"):
        files.save(PROFILES, "mine", TEXT, text_digest(TEXT))
    assert sorted(one.name for one in path.parent.iterdir()) == ["mine.yaml.bak"]


@each("name", ["", ".", "..", "../x", "a/b", "/etc/x", "a.yaml", "-x", ".hidden", "a\x00", "ä", "x" * 65])
def test_a_name_leads_nowhere_else(tmp_path: Path, name: str) -> None:
    with pytest.raises(NoSuchFile, match="is not a name"):
        opened(tmp_path).save(PROFILES, name, TEXT, "")


def test_links_and_shipped_files_are_never_written(tmp_path: Path) -> None:
    outside = tmp_path / "outside.yaml"
    outside.write_text(TEXT)
    own = tmp_path / "data/profiles"
    own.mkdir(parents=True)
    (own / "link.yaml").symlink_to(outside)
    files = opened(tmp_path / "data")
    with pytest.raises(NotWritable, match="link"):
        files.save(PROFILES, "link", "extends: base\n", text_digest(TEXT))
    assert not entries(files)["profiles", "link"].writable
    shipped = opened(tmp_path / "data", PROFILE_DIR=str(config_dir() / "profiles"))
    with pytest.raises(NotWritable, match="shipped"):
        shipped.save(PROFILES, "h100x4", TEXT, "")
    assert outside.read_text() == TEXT


def test_values_are_nested_as_in_a_file_each_with_its_origin() -> None:
    rows: list[tuple[str, Any, str]] = [
        ("targets.lora_r", 64, "mine.yaml:3"),
        ("targets.dtype", "bf16", "base.yaml:9"),
        ("limits.gpu_memory", "75GB", "default"),
        ("engine_config.axolotl.a.b", True, "mine.yaml:9"),
        ("rules.blackout", ["Sun 03:00-05:00"], "mine.yaml:10"),
        ("rules.size.<7B", "no: text", "set"),
    ]
    values = [EffectiveValue(path=path, value=value, origin=origin) for path, value, origin in rows]
    text = effective_yaml(values)
    assert yaml.safe_load(text) == {
        "targets": {"lora_r": 64, "dtype": "bf16"},
        "limits": {"gpu_memory": "75GB"},
        "engine_config": {"axolotl": {"a.b": True}},
        "rules": {"blackout": ["Sun 03:00-05:00"], "size": {"<7B": "no: text"}},
    }
    assert text.splitlines()[1].split("  # ") == [f"{'  lora_r: 64':<44}", "mine.yaml:3"]
