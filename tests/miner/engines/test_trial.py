"""What can be trained is found out by trial: once for each image, again when the image changes."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from core.choices import Engine as TrainingEngine
from core.run_files import LOG_FILE
from miner.engines.base import EngineSpec, Phase, Status, Unreachable, Why
from miner.engines.trial import (
    AGAIN_S,
    BEING_TRIED,
    LOOK_S,
    RECHECK_S,
    RETRY_S,
    Lacks,
    TrialFailed,
    Trials,
    lacking_in,
)

READY = json.dumps({"axolotl": "", "native": "", "kohya": "", "ai-toolkit": ""})


@dataclass
class Answering:
    """An engine whose runs end at once, with one output for all."""

    output: str = READY
    why: Why = Why.OK
    identities: dict[str, str] = field(default_factory=lambda: {"text": "1", "image": "1", "toolkit": "1"})
    absent: dict[str, str] = field(default_factory=dict)
    tried: list[str] = field(default_factory=list)
    name: str = "docker"
    can_sandbox: bool = True
    #: Runs end once it is set.
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    stopped: list[str] = field(default_factory=list)
    asked: int = 0

    def __post_init__(self) -> None:
        self.ending.set()

    async def submit(self, spec: EngineSpec) -> str:
        assert spec.argv[:3] == ("python", "-m", "trainer.ready")
        assert spec.hostile
        assert not spec.gpus
        self.tried.append(spec.image)
        (spec.run_dir / LOG_FILE).write_text(f"a warning of some library\n{self.output}\n")
        return spec.key

    async def poll(self, ref: str, run_dir: Path) -> Status:
        if not self.ending.is_set() and ref not in self.stopped:
            return Status(Phase.RUNNING)
        return Status(Phase.ENDED, self.why, 0 if self.why is Why.OK else 1)

    async def stop(self, ref: str, *, force: bool = False) -> None:
        self.stopped.append(ref)

    async def remove(self, ref: str) -> None: ...

    async def lacks(self) -> dict[str, str]:
        return self.absent

    async def identity(self, image: str) -> str:
        self.asked += 1
        return self.identities[image]


def trials(engine: Answering, data_dir: Path, clock: list[float] | None = None) -> Trials:
    now = clock or [0.0]
    return Trials(engine, data_dir, lambda: now[0])  # type: ignore[arg-type]


async def settled(tried: Trials) -> Lacks:
    """What it knows once every trial that is due has ended."""
    found = await tried.lacks()
    while tried.trying:
        await tried.pause(60)
        found = await tried.lacks()
    return found


async def test_each_image_is_tried_once_and_again_when_it_changes(tmp_path: Path) -> None:
    engine, clock = Answering(), [0.0]
    tried = trials(engine, tmp_path, clock)
    assert await settled(tried) == await settled(tried) == {}
    assert engine.tried == ["text", "image", "toolkit"]
    asked = engine.asked
    engine.identities["image"] = "2"
    for _ in range(6):
        await settled(tried)
        clock[0] += LOOK_S / 6
    assert engine.asked == asked
    await settled(tried)
    assert engine.tried[3:] == ["image"]
    assert tried.running is None
    assert not list(tmp_path.glob(".trial-*"))


async def test_what_is_missing_is_known_by_training_engine_and_survives_a_restart(tmp_path: Path) -> None:
    engine = Answering(json.dumps({"axolotl": "no axolotl", "native": ""}), absent={"image": "not built"})
    engine.absent["toolkit"] = "not built"
    expected = {
        TrainingEngine.AXOLOTL: "no axolotl",
        TrainingEngine.KOHYA: "not built",
        TrainingEngine.AI_TOOLKIT: "not built",
    }
    assert await settled(trials(engine, tmp_path)) == expected
    assert await settled(trials(engine, tmp_path)) == expected
    assert engine.tried == ["text"]
    (tmp_path / "engines" / "trials.json").write_text("{")
    assert await settled(trials(engine, tmp_path)) == expected
    assert engine.tried == ["text", "text"]


async def test_an_image_that_cannot_run_our_code_trains_nothing_and_is_tried_again_later(
    tmp_path: Path,
) -> None:
    engine = Answering("Traceback …\nModuleNotFoundError: No module named 'pydantic'", Why.FAILED)
    engine.absent = {"image": "not built", "toolkit": "not built"}
    clock = [0.0]
    tried = trials(engine, tmp_path, clock)
    lacks = await settled(tried)
    assert "No module named 'pydantic'" in lacks[TrainingEngine.AXOLOTL]
    assert lacks[TrainingEngine.AXOLOTL] == lacks[TrainingEngine.NATIVE]
    engine.output, engine.why = READY, Why.OK
    assert await settled(tried) == lacks
    clock[0] += RETRY_S
    assert TrainingEngine.NATIVE not in await settled(tried)


async def test_what_was_missing_is_looked_for_again_and_counts_until_another_trial_has_run(
    tmp_path: Path,
) -> None:
    """A slow disk must not refuse a kind of offers for good. What is complete is not tried again."""
    engine, clock = Answering(json.dumps({"kohya": "python: timed out"})), [0.0]
    engine.absent = {"text": "not built", "toolkit": "not built"}
    tried = trials(engine, tmp_path, clock)
    found = await settled(tried)
    assert found[TrainingEngine.KOHYA] == "python: timed out"
    tried = trials(engine, tmp_path, clock)  # another start
    assert await settled(tried) == found
    engine.why = Why.OOM_KILLED
    clock[0] += RECHECK_S
    assert await settled(tried) == await settled(tried) == found
    engine.why, engine.output = Why.OK, READY
    clock[0] += RECHECK_S
    assert TrainingEngine.KOHYA not in await settled(tried)
    clock[0] += RECHECK_S
    assert TrainingEngine.KOHYA not in await settled(tried)
    assert engine.tried == ["image"] * 3


async def test_what_a_library_says_at_the_end_does_not_hide_the_answer(tmp_path: Path) -> None:
    engine = Answering(f"{READY}\nException ignored in: <function finalize>")
    assert await lacking_in(engine, tmp_path, "text") == {}  # type: ignore[arg-type]


async def test_a_trial_that_was_killed_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(TrialFailed, match="oom-killed"):
        await lacking_in(Answering(why=Why.OOM_KILLED), tmp_path, "text")  # type: ignore[arg-type]


async def test_an_engine_that_does_not_answer_is_no_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(_self: object) -> dict[str, str]:
        raise Unreachable("Docker does not run")

    monkeypatch.setattr(Answering, "lacks", silent)
    with pytest.raises(Unreachable):
        await trials(Answering(), tmp_path).lacks()


async def test_nobody_waits_for_a_trial_and_it_ends_with_the_daemon(tmp_path: Path) -> None:
    engine = Answering(absent={"image": "not built", "toolkit": "not built"})
    engine.ending.clear()
    tried = trials(engine, tmp_path)
    async with asyncio.timeout(60):
        for _ in range(3):
            assert (await tried.lacks())[TrainingEngine.AXOLOTL] == BEING_TRIED
            await tried.pause(0.01)
        await tried.close()
    assert engine.tried == ["text"]
    assert len(engine.stopped) == 1
    assert not list(tmp_path.glob(".trial-*"))


async def test_a_result_counts_only_for_the_image_that_is_still_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a trial that died with its engine say anything about the image."""

    async def away(_self: object, _image: str) -> str:
        raise Unreachable("Docker does not run")

    engine = Answering(why=Why.OOM_KILLED, absent={"image": "not built", "toolkit": "not built"})
    clock = [0.0]
    tried = trials(engine, tmp_path, clock)
    await tried.lacks()
    monkeypatch.setattr(Answering, "identity", away)
    await tried.pause(60)
    monkeypatch.undo()
    engine.why = Why.OK
    clock[0] += LOOK_S
    assert TrainingEngine.NATIVE not in await settled(tried)
    clock[0] += LOOK_S
    engine.identities["text"], engine.output = "2", json.dumps({"axolotl": "no axolotl", "native": ""})
    engine.ending.clear()
    await tried.lacks()
    await tried.pause(0.05)
    engine.identities["text"], engine.output = "3", READY
    engine.ending.set()
    assert TrainingEngine.AXOLOTL not in await settled(tried)
    assert engine.tried == ["text"] * 4


@pytest.mark.parametrize("error", [Unreachable("Docker does not run"), ValueError("a bug")])
async def test_a_trial_that_finds_out_nothing_is_repeated_after_a_pause_and_keeps_no_other_from_its_turn(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def identity(engine: Answering, image: str) -> str:
        current = asyncio.current_task()
        if image == "text" and current is not None and current.get_name() == "trial":
            raise error
        return engine.identities[image]

    monkeypatch.setattr(Answering, "identity", identity)
    engine, clock = Answering(), [0.0]
    tried = trials(engine, tmp_path, clock)

    async def rounds() -> Lacks:
        found: Lacks = {}
        for _ in range(20):
            found = await tried.lacks()
            if tried.trying:
                await tried.pause(60)
        return found

    await rounds()
    assert engine.tried == ["text", "image", "toolkit"]
    clock[0] += AGAIN_S
    found = await rounds()
    assert engine.tried == ["text", "image", "toolkit", "text"]
    assert str(error) in found[TrainingEngine.AXOLOTL]
    monkeypatch.undo()
    clock[0] += LOOK_S
    assert await settled(tried) == {}
