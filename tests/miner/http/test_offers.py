"""Offers on the operator's port: what came, why it was answered so, and what a change would have done."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from core.domain.tasks import TaskType
from miner.config_files import what_if
from tests.doubles.each import each
from tests.miner.http.daemon_in_process import DaemonInProcess, task


async def page(running: DaemonInProcess, **query: Any) -> dict[str, Any]:
    reply = await running.operator.get("/offers", params=query)
    assert reply.status_code == 200, reply.text
    return reply.json()  # type: ignore[no-any-return]


async def backtest(running: DaemonInProcess, **wanted: Any) -> Any:
    return await running.operator.post("/backtest", json=wanted)


@each("page", ["offers", "jobs"])
async def test_a_number_that_no_row_can_have_is_refused(running: DaemonInProcess, page: str) -> None:
    reply = await running.operator.get(f"/{page}", params={"before": 10**20})
    assert reply.status_code == 422


async def test_offers_are_listed_newest_first_and_by_pages(running: DaemonInProcess) -> None:
    sent = [task(seed=seed) for seed in range(5)]
    for one in sent:
        await running.offer(one)
    first = await page(running, limit=2)
    second = await page(running, limit=2, before=first["next"])
    last = await page(running, limit=2, before=second["next"])
    listed = [row["task_id"] for part in (first, second, last) for row in part["offers"]]
    assert listed == [one.task_id for one in reversed(sent)]
    assert (first["next"] is None, last["next"]) == (False, None)
    assert (first["offers"][0]["accepted"], first["offers"][0]["became"]) == (True, "open")


async def test_the_list_is_narrowed_by_answer_task_type_and_text(running: DaemonInProcess) -> None:
    instruct, dpo = task(seed=1), task(TaskType.DPO, 2)
    for one in (instruct, dpo):
        await running.offer(one)

    async def tasks(**query: Any) -> list[str]:
        return [row["task_id"] for row in (await page(running, **query))["offers"]]

    assert await tasks(task_type="DpoTask") == [dpo.task_id]
    assert await tasks(accepted="false") == []
    assert await tasks(accepted="true") == [dpo.task_id, instruct.task_id]
    assert await tasks(q=instruct.task_id[:20].upper()) == [instruct.task_id]
    assert await tasks(q="%") == []


@each(
    "query", ["limit=0", "limit=501", "before=-1", "accepted=perhaps", "task_type=Nothing", f"q={'x' * 201}"]
)
async def test_a_wrong_question_about_offers_is_refused(running: DaemonInProcess, query: str) -> None:
    assert (await running.operator.get(f"/offers?{query}")).status_code == 422


async def test_an_offer_is_explained_with_every_rule_and_with_what_would_let_it_pass(
    running: DaemonInProcess,
) -> None:
    offered = task(seed=1)
    payload = {**offered.offer(), "hours_to_complete": 500}
    await running.post(offered.offer_path, payload)
    (row,) = (await page(running))["offers"]
    explained = (await running.operator.get(f"/offers/{row['id']}")).json()
    assert explained["task_id"] == offered.task_id
    assert {one["rule"] for one in explained["explanation"]["reasons"]} > {"hours", "gpus"}
    assert explained["explanation"]["accepted"] is row["accepted"]
    assert isinstance(explained["overrides"], dict)
    missing = await running.operator.get("/offers/999999")
    assert (missing.status_code, missing.json()["error"]) == (404, "no_such_offer")


@pytest.mark.process
async def test_a_backtest_compares_the_policy_in_force_with_a_changed_one(running: DaemonInProcess) -> None:
    for seed in range(3):
        await running.offer(task(seed=seed))
    reply = await backtest(running, days=1, overrides={"rules.max_hours": 0.5})
    assert reply.status_code == 200, reply.text
    found = reply.json()
    assert (found["offers"], found["policy"]) == (3, "everything-feasible")
    assert (found["before"]["accepted"], found["after"]["accepted"]) == (3, 0)
    assert found["changed"] == len(found["changes"]) == 3
    assert "over the limit of 0.5" in found["changes"][0]["why"]
    assert found["before"]["held_gpu_hours"] >= found["after"]["held_gpu_hours"]


@pytest.mark.usefixtures("answered_here")
async def test_a_backtest_of_a_wrong_key_says_what_is_wrong(running: DaemonInProcess) -> None:
    reply = await backtest(running, overrides={"rules.max_hour": 12})
    assert (reply.status_code, reply.json()["error"]) == (422, "bad_config")
    assert "max_hours" in reply.json()["message"]
    reply = await backtest(running, overrides={"rules.hours": 5, "rules.hours.chat": 12})
    assert (reply.status_code, reply.json()["error"]) == (422, "bad_config")


@pytest.mark.usefixtures("answered_here")
async def test_one_backtest_at_a_time_and_validators_are_answered_meanwhile(
    running: DaemonInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, may_go_on = asyncio.Event(), asyncio.Event()
    run_order = what_if.run_order

    async def held_back(*order: Any, **how: Any) -> Any:
        started.set()
        await may_go_on.wait()
        return await run_order(*order, **how)

    monkeypatch.setattr(what_if, "run_order", held_back)
    first = asyncio.create_task(backtest(running, overrides={"rules.max_hours": 12}))
    await started.wait()
    second = await backtest(running, overrides={"rules.max_hours": 12})
    assert (second.status_code, second.json()["error"]) == (429, "what_if_busy")
    assert (await running.offer(task(seed=2))).status_code == 200
    may_go_on.set()
    assert (await first).json()["offers"] == 1
    assert (await backtest(running, overrides={"rules.max_hours": 12})).status_code == 200


MINE = "/config/profiles/base"
GOOD, BAD = "extends: base\ntargets:\n  lora_r: 64\n", "extends: base\ntargets:\n  lora_rank: 64\n"


@pytest.mark.process
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


@pytest.mark.usefixtures("answered_here")
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


@pytest.mark.usefixtures("answered_here")
async def test_a_check_shows_nothing_of_files_that_are_no_profiles(running: DaemonInProcess) -> None:
    """The dashboard asks for it too, without the operator's token."""
    secret = running.daemon.settings.data_dir / "secret.yaml"
    secret.write_text("targets: {lora_r: SECRETVALUE}\n")
    for path in (str(secret), "../secret.yaml"):
        checked = await running.operator.post(f"{MINE}/check", json={"text": f"extends: {path}\n"})
        assert not checked.json()["valid"]
        assert "must name a file in" in checked.json()["problems"][0]["text"]
        assert "SECRETVALUE" not in checked.text
