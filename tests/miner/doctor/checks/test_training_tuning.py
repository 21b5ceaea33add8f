from __future__ import annotations

from pathlib import Path

from miner.doctor import CheckContext, Finding, FindingStatus
from miner.doctor.checks import training
from miner.settings import load_settings


def found(folder: Path, **env: str) -> list[Finding]:
    """On four H100, as GPUS says."""
    given = {"DATA_DIR": str(folder), "GPUS": "4xH100", **env}
    return list(training.check_tuning(CheckContext(load_settings(env=given, env_file=None))))


def test_what_is_in_force_is_named_with_its_reason(tmp_path: Path) -> None:
    policy, profile = found(tmp_path)
    assert (policy.status, profile.status) == (FindingStatus.OK, FindingStatus.OK)
    assert "h100x4" in policy.detail
    assert "POLICY is auto, with 4xH100" in policy.detail
    assert "because policy h100x4 names it and PROFILE is auto" in profile.detail


def test_a_broken_file_is_a_failure_in_force_and_a_warning_beside(tmp_path: Path) -> None:
    (tmp_path / "profiles").mkdir()
    (tmp_path / "policies").mkdir()
    (tmp_path / "profiles" / "mine.yaml").write_text("targets: {lora_rr: 1}")
    (tmp_path / "policies" / "mine.yaml").write_text("rules: {hors: 1}")
    beside = [one for one in found(tmp_path) if one.status is FindingStatus.WARN]
    assert [one.what for one in beside] == ["policy", "profile"]
    assert "lora_rr" in beside[1].detail
    assert "not in force" in beside[1].fix
    failed = found(tmp_path, PROFILE="mine")[0]
    assert failed.status is FindingStatus.FAIL
    assert "mine.yaml:1: targets.lora_rr" in failed.detail
