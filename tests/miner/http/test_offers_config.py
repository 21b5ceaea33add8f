"""The operator's files on the operator's port, with the child process that checks them."""

from __future__ import annotations

import json

import pytest

from tests.miner.http.daemon_in_process import DaemonInProcess

pytestmark = pytest.mark.process


MINE = "/config/profiles/base"
GOOD, BAD = "extends: base\ntargets:\n  lora_r: 64\n", "extends: base\ntargets:\n  lora_rank: 64\n"


async def test_an_edit_is_checked_saved_noted_and_in_force(
    running: DaemonInProcess,
) -> None:
    client = running.operator
    shipped = (await client.get(MINE)).json()
    assert (shipped["in_force"], shipped["own"]) == (True, False)
    checked = (await client.post(f"{MINE}/check", json={"text": GOOD})).json()
    assert checked["valid"]
    assert checked["effects"]["tasks"]
    saved = await client.put(MINE, json={"text": GOOD, "digest": shipped["digest"]})
    assert saved.status_code == 200, saved.text
    assert (saved.json()["own"], saved.json()["in_force"], saved.json()["text"]) == (True, True, GOOD)
    assert running.daemon.policy_runtime.profile.file == running.daemon.settings.profile_dir / "base.yaml"
    (event,) = running.rows("SELECT * FROM events WHERE kind = 'config_saved'")
    assert "targets.lora_r – → 64" in json.loads(event["data"])["text"]


async def test_a_save_of_something_invalid_stale_or_elsewhere_changes_nothing(
    running: DaemonInProcess,
) -> None:
    client, folder = running.operator, running.daemon.settings.profile_dir
    invalid = await client.put(MINE, json={"text": BAD, "digest": ""})
    assert (invalid.status_code, invalid.json()["error"]) == (422, "bad_config")
    assert (invalid.json()["problems"][0]["line"], invalid.json()["problems"][0]["column"]) == (3, 3)
    assert not (folder / "base.yaml").exists()
    stale = await client.put(MINE, json={"text": GOOD, "digest": "0" * 64})
    assert (stale.status_code, stale.json()["error"]) == (409, "stale_file")
    for path, status in (
        ("/config/profiles/..%2fx", 404),
        ("/config/profiles/.x", 404),
        ("/config/nothing/x", 422),
    ):
        assert (await client.put(path, json={"text": GOOD, "digest": ""})).status_code == status
    long = await client.put(MINE, json={"text": "#" * 70_000, "digest": ""})
    assert long.status_code == 422
    assert not folder.exists() or list(folder.iterdir()) == []


async def test_files_are_listed_and_a_missing_one_is_no_page(running: DaemonInProcess) -> None:
    found = (await running.operator.get("/config")).json()
    assert found["in_force"]["profile"] == "base"
    assert {one["kind"] for one in found["files"]} >= {"profiles", "policies"}
    assert (await running.operator.get("/config/profiles/nothing")).status_code == 404
    reply = await running.operator.get("/config", headers={"authorization": "Bearer x"})
    assert reply.status_code == 401


async def test_a_check_shows_nothing_of_files_that_are_no_profiles(running: DaemonInProcess) -> None:
    """The dashboard asks for it too, without the operator's token."""
    secret = running.daemon.settings.data_dir / "secret.yaml"
    secret.write_text("targets: {lora_r: SECRETVALUE}\n")
    for path in (str(secret), "../secret.yaml"):
        checked = await running.operator.post(f"{MINE}/check", json={"text": f"extends: {path}\n"})
        assert not checked.json()["valid"]
        assert "must name a file in" in checked.json()["problems"][0]["text"]
        assert "SECRETVALUE" not in checked.text
