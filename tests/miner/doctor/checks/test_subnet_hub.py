from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from miner.doctor import CheckContext, Finding, FindingStatus
from miner.doctor.checks import subnet
from miner.settings import load_settings
from tests.doubles.hub import Hub

pytestmark = pytest.mark.process


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as running:
        yield running


def looked_at(tmp_path: Path, **more: object) -> Finding:
    settings = load_settings(env={}, env_file=None, data_dir=tmp_path / "data", **more)
    (found,) = subnet.check_hub(CheckContext(settings))
    return found


def online(tmp_path: Path, hub: Hub, **more: object) -> Finding:
    about: dict[str, object] = {"hub": "huggingface", "hf_endpoint": hub.url, "hf_token": hub.token}
    return looked_at(tmp_path, **about | more)


def test_a_token_that_may_write_is_named_with_its_user(tmp_path: Path, hub: Hub) -> None:
    found = online(tmp_path, hub)
    assert found.status is FindingStatus.OK
    assert "tester, token of role write, publishing as tester" in found.detail


def test_a_token_that_may_only_read_or_not_there_is_a_failure(tmp_path: Path, hub: Hub) -> None:
    hub.roles["tester"] = {"role": "read"}
    assert online(tmp_path, hub).status is FindingStatus.FAIL
    assert "HF_USER" in online(tmp_path, hub, hf_user="guild").detail
    hub.orgs["guild"] = {"roleInOrg": "read"}
    assert "may only read in guild" in online(tmp_path, hub, hf_user="guild").detail


def test_a_wrong_token_none_or_no_hub_are_failures_with_a_way_out(tmp_path: Path, hub: Hub) -> None:
    wrong = online(tmp_path, hub, hf_token="hf_" + "w" * 34)
    assert wrong.status is FindingStatus.FAIL
    assert "HF_TOKEN" in wrong.fix
    assert "w" * 34 not in wrong.detail
    assert online(tmp_path, hub, hf_token=None).status is FindingStatus.FAIL
    away = online(tmp_path, hub, hf_endpoint="http://127.0.0.1:9")
    assert "HF_ENDPOINT" in away.fix


def test_a_folder_must_be_one_that_can_be_written(tmp_path: Path) -> None:
    assert looked_at(tmp_path).status is FindingStatus.OK
    (tmp_path / "file").write_text("x")
    assert looked_at(tmp_path, hub=f"local:{tmp_path}/file/hub").status is FindingStatus.FAIL


def test_a_folder_on_a_real_chain_is_warned_of(tmp_path: Path) -> None:
    about = {"chain": "bittensor", "hub": f"local:{tmp_path}/hub"}
    found = looked_at(tmp_path, **about)
    assert found.status is FindingStatus.WARN
    assert "no validator finds" in found.detail
