"""An engine that does not answer: offers are refused meanwhile, jobs go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.choices import Engine
from miner.engines import trial
from miner.engines.choose import Choice
from miner.fleet.base import Ability
from miner.jobs import build
from miner.jobs.states import JobState
from miner.settings import load_settings
from tests.miner.jobs.house import FAST, CoroutineEngine, House, fleet_of, opened


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with opened(tmp_path / "data", replace(FAST, pulse_s=0.01)) as one:
        yield one


async def test_an_engine_that_goes_and_comes_is_told_to_those_who_decide(house: House) -> None:
    assert house.fleet.snapshot(0.0).ability == Ability()
    house.engine.gone = True
    await house.until(lambda: house.fleet.ability.trouble is not None)
    assert "does not answer" in (house.fleet.snapshot(0.0).ability.trouble or "")
    house.engine.gone = False
    await house.until(lambda: house.fleet.ability.trouble is None)
    assert [kind for kind, _ in house.alerts] == ["engine_gone", "engine_back"]
    assert (await house.over_within(await house.start())).state is JobState.DONE


async def test_an_engine_with_a_bug_is_one_that_does_not_answer(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails() -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(house.engine, "lacks", fails)
    await house.until(lambda: house.fleet.ability.trouble is not None)
    monkeypatch.undo()
    await house.until(lambda: house.fleet.ability.trouble is None)


async def test_an_engine_without_a_sandbox_says_so(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CoroutineEngine, "can_sandbox", False)
    await house.until(lambda: house.fleet.ability.no_sandbox is not None)
    assert house.alerts == []


async def test_what_an_engine_lacks_is_told_to_those_who_decide(house: House) -> None:
    house.engine.lacking = {"image": "not built"}
    await house.until(lambda: house.fleet.ability.lacks == {Engine.KOHYA: "not built"})
    assert house.fleet.ability.trouble is None


async def test_an_engine_with_nothing_to_train_is_told_whenever_it_comes_to_that(house: House) -> None:
    """Also one that was not there before, and is there now: it did not come back."""
    nothing = dict.fromkeys(("text", "image", "toolkit"), "not built")
    house.engine.gone = True
    await house.until(lambda: house.fleet.ability.trouble is not None)
    house.engine.lacking, house.engine.gone = nothing, False
    await house.until(lambda: len(house.alerts) == 2)
    house.engine.lacking = {}
    await house.until(lambda: len(house.alerts) == 3)
    house.engine.lacking = nothing
    await house.until(lambda: len(house.alerts) == 4)
    kinds = ["engine_gone", "engine_cannot_train", "engine_back", "engine_cannot_train"]
    assert [kind for kind, _ in house.alerts] == kinds
    assert house.alerts[1][1] == "every offer is refused: not built"


async def test_an_engine_that_goes_during_a_trial_is_noticed_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is being tried out is refused meanwhile, and nothing of it is an alert."""
    never = asyncio.Event()

    async def lacking_in(*_: object, **__: object) -> dict[Engine, str]:
        await never.wait()
        return {}

    monkeypatch.setattr(trial, "lacking_in", lacking_in)
    async with opened(tmp_path / "data", replace(FAST, pulse_s=0.01), with_trials=True) as house:
        await house.until(lambda: house.fleet.ability.lacks.get(Engine.NATIVE) == trial.BEING_TRIED)
        assert house.fleet.ability.trouble is None
        assert house.alerts == []
        house.engine.gone = True
        await house.until(lambda: house.fleet.ability.trouble is not None)
        house.engine.gone = False
        await house.until(lambda: house.fleet.ability.trouble is None)
        assert [kind for kind, _ in house.alerts] == ["engine_gone"]
        never.set()
        await house.until(lambda: house.fleet.ability == Ability())
        assert [kind for kind, _ in house.alerts] == ["engine_gone", "engine_back"]


async def test_until_there_is_an_engine_nothing_can_be_trained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    choices: list[Any] = [Choice(None, "Docker does not run")]

    async def choose(_settings: object) -> Choice:
        return choices[-1]

    monkeypatch.setattr(build.choose, "choose", choose)
    monkeypatch.setattr(build, "LOOK_AGAIN_SECONDS", 0.01)
    fleet, alerts = fleet_of(), []
    settings = load_settings(env={"DATA_DIR": str(tmp_path)}, env_file=None)
    found = asyncio.create_task(build.find_engine(settings, lambda *told: alerts.append(told), fleet))
    async with asyncio.timeout(120):
        while fleet.ability.trouble is None:
            await asyncio.sleep(0.01)
    assert fleet.ability.trouble == "Docker does not run"
    choices.append(Choice(CoroutineEngine(), "found"))
    assert await found is choices[-1].engine
    assert [kind for kind, _ in alerts] == ["no_engine"]
