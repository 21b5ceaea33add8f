"""A backend that does not answer: offers are refused meanwhile, jobs go on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.domain.choices import Engine
from miner.backends import trial
from miner.backends.registry import BackendChoice
from miner.fleet.base import BackendAbility
from miner.jobs import build
from miner.settings import BackendKind, load_settings
from tests.miner.jobs.harness import FAST, CoroutineBackend, JobsHarness, fleet_of, open_harness


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[JobsHarness]:
    async with open_harness(tmp_path / "data", replace(FAST, backend_check_s=0.01)) as harness:
        yield harness


async def test_a_backend_that_goes_and_comes_is_reported_to_those_who_decide(harness: JobsHarness) -> None:
    assert harness.fleet.ability == BackendAbility()
    harness.backend.gone = True
    await harness.until(lambda: harness.fleet.ability.problem is not None)
    assert "does not answer" in (harness.fleet.ability.problem or "")
    harness.backend.gone = False
    await harness.until(lambda: harness.fleet.ability.problem is None)
    assert [kind for kind, _ in harness.alerts] == ["backend_gone", "backend_back"]
    await harness.done(await harness.start())


async def test_a_backend_with_a_bug_is_one_that_does_not_answer(
    harness: JobsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(harness.backend, "missing_images", lambda: 1 / 0)
    await harness.until(lambda: harness.fleet.ability.problem is not None)
    monkeypatch.undo()
    await harness.until(lambda: harness.fleet.ability.problem is None)


async def test_what_a_backend_lacks_is_reported_to_those_who_decide(
    harness: JobsHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CoroutineBackend, "can_sandbox", False)
    harness.backend.lacking = {"image": "not built"}
    await harness.until(lambda: harness.fleet.ability.missing == {Engine.KOHYA: "not built"})
    assert harness.fleet.ability.no_sandbox is not None
    assert harness.fleet.ability.problem is None
    assert harness.alerts == []


async def test_a_backend_with_nothing_to_train_is_reported_whenever_it_comes_to_that(
    harness: JobsHarness,
) -> None:
    """Also one that was not there before, and is there now: it did not come back."""
    nothing = dict.fromkeys(("text", "image", "toolkit"), "not built")
    harness.backend.gone = True
    await harness.until(lambda: harness.fleet.ability.problem is not None)
    harness.backend.lacking, harness.backend.gone = nothing, False
    await harness.until(lambda: len(harness.alerts) == 2)
    harness.backend.lacking = {}
    await harness.until(lambda: len(harness.alerts) == 3)
    harness.backend.lacking = nothing
    await harness.until(lambda: len(harness.alerts) == 4)
    kinds = ["backend_gone", "backend_cannot_train", "backend_back", "backend_cannot_train"]
    assert [kind for kind, _ in harness.alerts] == kinds
    assert harness.alerts[1][1] == "every offer is refused: not built"


async def test_a_backend_that_goes_during_a_trial_is_noticed_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What is being tried out is refused meanwhile, and nothing of it is an alert."""
    never = asyncio.Event()

    async def lacking_in(*_: object, **__: object) -> dict[Engine, str]:
        await never.wait()
        return {}

    monkeypatch.setattr(trial, "missing_in_image", lacking_in)
    async with open_harness(
        tmp_path / "data", replace(FAST, backend_check_s=0.01), with_trials=True
    ) as harness:
        await harness.until(lambda: harness.fleet.ability.missing.get(Engine.NATIVE) == trial.BEING_TRIED)
        assert harness.fleet.ability.problem is None
        assert harness.alerts == []
        harness.backend.gone = True
        await harness.until(lambda: harness.fleet.ability.problem is not None)
        harness.backend.gone = False
        await harness.until(lambda: harness.fleet.ability.problem is None)
        assert [kind for kind, _ in harness.alerts] == ["backend_gone"]
        never.set()
        await harness.until(lambda: harness.fleet.ability == BackendAbility())
        assert [kind for kind, _ in harness.alerts] == ["backend_gone", "backend_back"]


async def test_until_there_is_a_backend_nothing_can_be_trained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    choices: list[Any] = [BackendChoice(None, "Docker does not run")]

    async def choose(_settings: object, _kind: object) -> BackendChoice:
        return choices[-1]

    monkeypatch.setattr(build.registry, "choose_backend", choose)
    monkeypatch.setattr(build, "BACKEND_RETRY_SECONDS", 0.01)
    fleet, alerts = fleet_of(), []
    settings = load_settings(env={"DATA_DIR": str(tmp_path)}, env_file=None)
    backend = asyncio.create_task(
        build.wait_for_backend(settings, BackendKind.AUTO, lambda *alert: alerts.append(alert), fleet)
    )
    async with asyncio.timeout(120):
        while fleet.ability.problem is None:
            await asyncio.sleep(0.01)
    assert fleet.ability.problem == "Docker does not run"
    choices.append(BackendChoice(CoroutineBackend(), "found"))
    assert await backend is choices[-1].backend
    assert [kind for kind, _ in alerts] == ["no_backend"]
