"""Trial runs find out what can be trained: once for each image, and again when it changes."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from core.domain.choices import Engine
from core.runs.run_files import LOG_FILE
from miner.backends.base import AttemptSpec, BackendUnreachable, EndCause, RunPhase, RunStatus
from miner.backends.trial import (
    AGAIN_S,
    BEING_TRIED,
    IDENTITY_S,
    RECHECK_S,
    RETRY_S,
    BackendTrials,
    MissingByEngine,
    TrialFailed,
    missing_in_image,
)

READY = json.dumps({"axolotl": "", "native": "", "kohya": "", "ai-toolkit": ""})


@dataclass
class Answering:
    """A backend whose runs end at once, with one output for all."""

    output: str = READY
    why: EndCause = EndCause.OK
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

    async def submit(self, spec: AttemptSpec) -> str:
        assert spec.argv[:3] == ("python", "-m", "trainer.runner.check_engines")
        assert spec.hostile
        assert spec.argv[4:] == (("gpu",) if spec.gpus else ())
        self.tried.append(spec.image)
        (spec.run_dir / LOG_FILE).write_text(f"a warning of some library\n{self.output}\n")
        return spec.key

    async def poll(self, ref: str, run_dir: Path) -> RunStatus:
        if not self.ending.is_set() and ref not in self.stopped:
            return RunStatus(RunPhase.RUNNING)
        return RunStatus(RunPhase.ENDED, self.why, 0 if self.why is EndCause.OK else 1)

    async def stop(self, ref: str, *, force: bool = False) -> None:
        self.stopped.append(ref)

    async def remove(self, ref: str) -> None: ...

    async def missing_images(self) -> dict[str, str]:
        return self.absent

    async def identity(self, image: str) -> str:
        self.asked += 1
        return self.identities[image]


def trials(backend: Answering, data_dir: Path, clock: list[float] | None = None) -> BackendTrials:
    now = clock or [0.0]
    return BackendTrials(backend, data_dir, lambda: now[0])  # type: ignore[arg-type]


async def settled(tried: BackendTrials) -> MissingByEngine:
    """What it knows once every trial that is due has ended."""
    found = await tried.missing()
    while tried.is_running:
        await tried.pause(60)
        found = await tried.missing()
    return found


async def test_each_image_is_tried_once_and_again_when_it_changes(tmp_path: Path) -> None:
    backend, clock = Answering(), [0.0]
    tried = trials(backend, tmp_path, clock)
    assert await settled(tried) == await settled(tried) == {}
    assert backend.tried == ["text", "image", "toolkit"]
    asked = backend.asked
    backend.identities["image"] = "2"
    for _ in range(6):
        await settled(tried)
        clock[0] += IDENTITY_S / 6
    assert backend.asked == asked
    await settled(tried)
    assert backend.tried[3:] == ["image"]
    assert tried.running_key is None
    assert not list(tmp_path.glob(".trial-*"))


async def test_what_is_missing_is_known_by_engine_and_survives_a_restart(tmp_path: Path) -> None:
    backend = Answering(json.dumps({"axolotl": "no axolotl", "native": ""}), absent={"image": "not built"})
    backend.absent["toolkit"] = "not built"
    expected = {
        Engine.AXOLOTL: "no axolotl",
        Engine.KOHYA: "not built",
        Engine.AI_TOOLKIT: "not built",
    }
    assert await settled(trials(backend, tmp_path)) == expected
    assert await settled(trials(backend, tmp_path)) == expected
    assert backend.tried == ["text"]
    (tmp_path / "backends" / "trials.json").write_text("{")
    assert await settled(trials(backend, tmp_path)) == expected
    assert backend.tried == ["text", "text"]


async def test_an_image_that_cannot_run_our_code_trains_nothing_and_is_tried_again_later(
    tmp_path: Path,
) -> None:
    backend = Answering("Traceback …\nModuleNotFoundError: No module named 'pydantic'", EndCause.FAILED)
    backend.absent = {"image": "not built", "toolkit": "not built"}
    clock = [0.0]
    tried = trials(backend, tmp_path, clock)
    missing = await settled(tried)
    assert "No module named 'pydantic'" in missing[Engine.AXOLOTL]
    assert missing[Engine.AXOLOTL] == missing[Engine.NATIVE]
    backend.output, backend.why = READY, EndCause.OK
    assert await settled(tried) == missing
    clock[0] += RETRY_S
    assert Engine.NATIVE not in await settled(tried)


async def test_missing_parts_are_tried_again_and_count_until_the_next_result(
    tmp_path: Path,
) -> None:
    """A slow disk must not refuse a kind of offers for good. What is complete is not tried again."""
    backend, clock = Answering(json.dumps({"kohya": "python: timed out"})), [0.0]
    backend.absent = {"text": "not built", "toolkit": "not built"}
    tried = trials(backend, tmp_path, clock)
    found = await settled(tried)
    assert found[Engine.KOHYA] == "python: timed out"
    tried = trials(backend, tmp_path, clock)  # another start
    assert await settled(tried) == found
    backend.why = EndCause.OOM_KILLED
    clock[0] += RECHECK_S
    assert await settled(tried) == await settled(tried) == found
    backend.why, backend.output = EndCause.OK, READY
    clock[0] += RECHECK_S
    assert Engine.KOHYA not in await settled(tried)
    clock[0] += RECHECK_S
    assert Engine.KOHYA not in await settled(tried)
    assert backend.tried == ["image"] * 3


async def test_what_a_library_says_at_the_end_does_not_hide_the_answer(tmp_path: Path) -> None:
    backend = Answering(f"{READY}\nException ignored in: <function finalize>")
    assert await missing_in_image(backend, tmp_path, "text") == {}  # type: ignore[arg-type]


async def test_a_gpu_that_the_trial_gets_is_asked_for(tmp_path: Path) -> None:
    backend = Answering()
    await missing_in_image(backend, tmp_path, "text", gpus=("0",))  # type: ignore[arg-type]
    assert backend.tried == ["text"]


async def test_a_trial_that_was_killed_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(TrialFailed, match="oom-killed"):
        await missing_in_image(Answering(why=EndCause.OOM_KILLED), tmp_path, "text")  # type: ignore[arg-type]


async def test_an_unreachable_backend_is_not_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(_self: object) -> dict[str, str]:
        raise BackendUnreachable("Docker does not run")

    monkeypatch.setattr(Answering, "missing_images", silent)
    with pytest.raises(BackendUnreachable):
        await trials(Answering(), tmp_path).missing()


async def test_nobody_waits_for_a_trial_and_it_ends_with_the_daemon(tmp_path: Path) -> None:
    backend = Answering(absent={"image": "not built", "toolkit": "not built"})
    backend.ending.clear()
    tried = trials(backend, tmp_path)
    async with asyncio.timeout(60):
        for _ in range(3):
            assert (await tried.missing())[Engine.AXOLOTL] == BEING_TRIED
            await tried.pause(0.01)
        await tried.close()
    assert backend.tried == ["text"]
    assert len(backend.stopped) == 1
    assert not list(tmp_path.glob(".trial-*"))


async def test_a_result_counts_only_for_the_image_that_is_still_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a trial that died with its backend say anything about the image."""

    async def away(_self: object, _image: str) -> str:
        raise BackendUnreachable("Docker does not run")

    backend = Answering(why=EndCause.OOM_KILLED, absent={"image": "not built", "toolkit": "not built"})
    clock = [0.0]
    tried = trials(backend, tmp_path, clock)
    await tried.missing()
    monkeypatch.setattr(Answering, "identity", away)
    await tried.pause(60)
    monkeypatch.undo()
    backend.why = EndCause.OK
    clock[0] += IDENTITY_S
    assert Engine.NATIVE not in await settled(tried)
    clock[0] += IDENTITY_S
    backend.identities["text"], backend.output = "2", json.dumps({"axolotl": "no axolotl", "native": ""})
    backend.ending.clear()
    await tried.missing()
    await tried.pause(0.05)
    backend.identities["text"], backend.output = "3", READY
    backend.ending.set()
    assert Engine.AXOLOTL not in await settled(tried)
    assert backend.tried == ["text"] * 4


@pytest.mark.parametrize("error", [BackendUnreachable("Docker does not run"), ValueError("a bug")])
async def test_a_trial_that_finds_out_nothing_is_repeated_after_a_pause_and_keeps_no_other_from_its_turn(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def identity(backend: Answering, image: str) -> str:
        current = asyncio.current_task()
        if image == "text" and current is not None and current.get_name() == "trial":
            raise error
        return backend.identities[image]

    monkeypatch.setattr(Answering, "identity", identity)
    backend, clock = Answering(), [0.0]
    tried = trials(backend, tmp_path, clock)

    async def rounds() -> MissingByEngine:
        found: MissingByEngine = {}
        for _ in range(20):
            found = await tried.missing()
            if tried.is_running:
                await tried.pause(60)
        return found

    await rounds()
    assert backend.tried == ["text", "image", "toolkit"]
    clock[0] += AGAIN_S
    found = await rounds()
    assert backend.tried == ["text", "image", "toolkit", "text"]
    assert str(error) in found[Engine.AXOLOTL]
    monkeypatch.undo()
    clock[0] += IDENTITY_S
    assert await settled(tried) == {}
