"""The demo's lines and its end."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest

from miner.backends.environment import SOURCE_ROOT
from miner.backends.registry import NoBackend
from miner.backends.trial import BEING_TRIED, TRIAL_FAILED
from miner.cli.render import dev
from miner.dev import demo, stack
from miner.dev.demo import DemoNarrator, DemoResult, run_demo
from miner.dev.stack import StackError, throwaway_keys
from miner.jobs.backend_ability import BACKEND_NOT_FOUND_YET
from miner.settings import Settings


@pytest.mark.parametrize(
    ("python", "way_out"),
    [
        (None, "make demo"),
        (SOURCE_ROOT / ".venv-demo" / "bin" / "gone", "rm -rf .venv-demo && make demo"),
        (Path("/nowhere/bin/gone"), "set TRAINER_PYTHON to another"),
    ],
    ids=["none", "of the demo", "of the operator"],
)
def test_without_a_training_environment_the_demo_fails_and_names_the_way_out(
    python: Path | None, way_out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(settings: Settings) -> None:
        raise NoBackend(f"TRAINER_PYTHON={settings.trainer_python} does not work")

    monkeypatch.setattr(demo, "training_interpreter", broken)
    if python is not None:
        monkeypatch.setenv("TRAINER_PYTHON", str(python))
    result = run_demo(tmp_path)
    assert not result.held
    assert str(python) in (result.trouble or "")
    assert way_out in (result.trouble or "")


async def test_the_demo_waits_for_the_trial_of_what_it_trains_with_and_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    being = {"native": BEING_TRIED, "kohya": "not built"}
    pages = [
        {"backend": None, "trouble": BACKEND_NOT_FOUND_YET.problem, "lacks": {}},
        {"backend": "process", "trouble": None, "lacks": being},
        {"backend": "process", "trouble": None, "lacks": {"kohya": "not built"}},
        {"backend": "process", "trouble": None, "lacks": {"native": "no torch"}},
        {"backend": None, "trouble": "no sandbox", "lacks": {}},
        {"backend": "process", "trouble": None, "lacks": {"native": f"{TRIAL_FAILED} text image: slow"}},
    ]
    left = itertools.chain(pages, itertools.repeat({"backend": "process", "trouble": None, "lacks": being}))

    def status(_request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json={"training": next(left)})

    async with httpx.AsyncClient(base_url="http://miner", transport=httpx.MockTransport(status)) as operator:
        assert await demo.wait_for_trial(operator) is None
        assert await demo.wait_for_trial(operator) == "no torch"
        for seen in ("no sandbox", "text image: slow"):
            with pytest.raises(StackError, match=seen):
                await demo.wait_for_trial(operator)
        monkeypatch.setattr(demo, "PATIENCE_S", 0.01)
        with pytest.raises(StackError, match=f"the trial did not finish within .* s: {BEING_TRIED}"):
            await demo.wait_for_trial(operator)


async def test_only_what_lacks_something_is_to_be_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else went wrong is told with the end of the daemon's log."""
    trial = AsyncMock(side_effect=["no torch", StackError("it was not known")])
    monkeypatch.setattr(demo, "wait_for_trial", trial)
    ground = stack.DevStack(tmp_path, throwaway_keys(tmp_path), 1, 2)
    task = demo.demo_task("http://127.0.0.1:3/rows.json")
    with pytest.raises(NoBackend, match="cannot train: no torch"):
        await demo._play_validator(ground, task, lambda *_: None, tmp_path)
    assert (await demo._play_validator(ground, task, lambda *_: None, tmp_path)).trouble == "it was not known"


@pytest.mark.parametrize(
    ("result", "held"),
    [
        (DemoResult(base=5.0, best=4.0), True),
        (DemoResult(base=5.0, best=5.0), False),
        (DemoResult(base=5.0), False),
        (DemoResult(), False),
        (DemoResult(trouble="it broke", base=5.0, best=4.0), False),
    ],
)
def test_a_demo_holds_only_when_a_model_got_better(result: DemoResult, held: bool) -> None:
    assert result.held is held


def job(live: dict[str, Any] | None = None, *steps: str) -> dict[str, Any]:
    return {
        "model": "org/model",
        "attempts": [],
        "steps": [{"name": name, "outcome": "ok"} for name in steps],
        "live": live,
    }


def test_each_thing_that_happens_is_one_line() -> None:
    lines: list[str] = []
    narrator = DemoNarrator(lambda step, line: lines.append(f"{step}: {line}"))
    first = {"step": 1, "steps": 24, "loss": 5.6, "best_score": 5.5, "tokens_s": 1671.8}
    for seen in (
        job(),
        job({"stage": "check"}),
        job(None, "fetch"),
        job({"stage": "launch"}, "fetch", "gpus", "launch"),
        job({"stage": "data"}, "fetch", "gpus", "launch"),
        job({"stage": "data"}, "fetch", "gpus", "launch"),
        job({"stage": "train", **first}, "fetch", "gpus", "launch"),
        job({"stage": "train", **first}, "fetch", "gpus", "launch"),
        job({"stage": "train", "step": 9}, "fetch", "gpus", "launch", "publish early"),
    ):
        narrator.see(seen)
    assert lines == [
        "fetch: org/model and its rows",
        "train: started",
        "train: reads the rows",
        "train: step  1 of 24, loss 5.600, held out 5.500, 1,672 tokens/s",
        "publish: the best model so far",
        "train: step  9",
    ]


def test_what_is_shown_at_the_end_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    repository = "local/ea36a6d4-7aab-47c7-840a-277db0297eb1"
    shown = DemoResult(None, "org/model", 29.0, 5.6, 4.0, 24, repository, "e" * 64)
    dev.print_demo(shown, as_json=False)
    with dev.DemoProgress() as reported:
        reported("submission", "x" * 200)
    out, err = capsys.readouterr()
    assert all(len(line) <= 80 for line in (out + err).splitlines())
    assert repository in out
    assert "5.600 → 4.000" in out
    dev.print_demo(DemoResult(trouble="it broke"), as_json=False)
    assert "Nothing was trained: it broke" in capsys.readouterr().out
