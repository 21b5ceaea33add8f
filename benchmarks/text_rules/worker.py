"""Runs inside the training environment: trains the sides of cells that have no record yet, and compares them.

    training-python -m benchmarks.text_rules.worker '{"cells": […], "sides": […], "trainings": 2, …}'

One JSON line per cell. The stack is imported once and forked for every training.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from benchmarks import upstream
from benchmarks.text_rules import scale
from benchmarks.text_rules.cells import Cell, Records, digest_of
from benchmarks.text_rules.clock import USED
from benchmarks.text_rules.data import World, model_of, rows_of
from benchmarks.text_rules.scores import CellScores, compared, losses_of, run_spec
from core.runs.progress import parse_events
from tests.trainer.forks import ForkServer
from trainer.runner.planning import PROFILE_VARIABLE
from trainer.runner.processes import StopRequest, child_environment
from trainer.runner.text_runner import TextRunner

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
#: Against whom the others are compared, where they are there.
RIVALS = ("winner", "uncapped", "upstream", "base")
OURS = "ours"
#: Sides that are trained several times: by the same rules, results differ by up to a tenth and more.
REPEATED = ("winner", OURS)
#: What each side runs: a record counts until some of it changes.
_COMMON = (
    *("data.py", "scores.py", "scale.py", "cells.py", "../../tests/trainer/tiny.py"),
    *(f"../../trainer/{package}/**/*.py" for package in ("scoring", "inputs", "rewards")),
)
_RUNS = {
    "base": (),
    "winner": ("winner_rules.py", "minhash.py", "peer*.py"),
    "upstream": ("../upstream*.py",),
    OURS: ("profile.yaml", "clock.py"),
}
#: Real seconds for what takes CPU seconds: a busy machine is many times as slow.
PATIENCE = 30.0


def main(asked: dict[str, Any]) -> None:
    records = Records(Path(asked["records"]))
    with tempfile.TemporaryDirectory(prefix="text-rules-") as folder, Forks() as forks:
        for name in asked["cells"]:
            cell = Trainings(Cell.of(name), Path(asked.get("folder", folder)), forks, asked, records)
            try:
                told = cell.run(asked["sides"])
            except Exception as error:  # the other cells can still be run
                told = {"cell": name, "error": f"{type(error).__name__}: {error}"}
            sys.stdout.write(json.dumps(told) + "\n")
            sys.stdout.flush()


class Forks:
    """The stack, imported when it is first needed: a table whose records are all there needs none."""

    _server: ForkServer | None = None

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, *error: object) -> None:
        if self._server is not None:
            self._server.__exit__(*error)

    def start(self, *arguments: Any) -> Any:
        if self._server is None:
            self._server = ForkServer().__enter__()
        return self._server.start(*arguments)


class Trainings:
    """The sides of one cell: the same rows, the same base, the same seconds."""

    def __init__(
        self, cell: Cell, folder: Path, forks: Forks, asked: dict[str, Any], records: Records
    ) -> None:
        self.cell, self.forks, self.asked, self.records = cell, forks, asked, records
        self.seconds: float = asked["seconds"]
        self.bases, self.folder = folder / "bases", folder / cell.name

    @cached_property
    def files(self) -> tuple[Path, Path, Path]:
        """The base, the rows to train on and those to score on."""
        self.folder.mkdir(parents=True)
        base = model_of(self.cell, self.folder, self.bases)
        train, test = self.folder / "train.json", self.folder / "test.json"
        for path, rows in zip((train, test), rows_of(self.cell), strict=True):
            path.write_text(json.dumps(rows), encoding="utf-8")
        return base, train, test

    @cached_property
    def scores(self) -> CellScores:
        base, _, test = self.files
        return CellScores(self.cell, base, test, self.folder / "scores")

    def run(self, sides: list[str]) -> dict[str, Any]:
        found = {side: [self._record(side, number) for number in range(self._count(side))] for side in sides}
        rows = {side: [record["rows"] for record in records] for side, records in found.items()}
        losses = iter(losses_of(self.cell, [one for each in rows.values() for one in each]))
        means = {side: fmean(fmean(next(losses)) for _ in each) for side, each in rows.items()}
        against = {
            side: {
                rival: compared(self.cell, rows[rival], rows[side])
                for rival in (*RIVALS, *([OURS] if side.startswith(f"{OURS}:") else []))
                if rival in rows
            }
            for side in rows
            if side.partition(":")[0] == OURS
        }
        told = {side: [record["told"] for record in records] for side, records in found.items()}
        return {"cell": self.cell.name, "scores": means, "against": against, "told": told}

    def _count(self, side: str) -> int:
        """Number of trainings."""
        repeated = side.partition(":")[0] in REPEATED
        return int(self.asked.get("trainings", 1)) if repeated else 1

    def _record(self, side: str, number: int) -> dict[str, Any]:
        stamp = self._stamp(side, number)
        known = self.records.get(self.cell.name, side, stamp)
        if known is not None:
            return known
        began = time.time()
        # The folder is on Python's path: no colon.
        work = self.folder / f"{side.replace(':', '-')}-{number}"
        told = self._train(side, number, work)
        model = None if side == "base" else work.with_name(f"{work.name}-model")
        told["wall_s"] = round(time.time() - began, 1)
        record = {
            "cell": self.cell.name,
            "side": side,
            "stamp": stamp,
            "told": told,
            "rows": self.scores.of(model),
        }
        self.records.add(record)
        return record

    def _stamp(self, side: str, number: int) -> str:
        kind, _, variant = side.partition(":")
        changes = self.asked["variants"].get(variant, "")
        again = f" training {number + 1}" if number else ""
        return f"{_programs(kind)} {self.seconds:g} {changes}".strip() + again

    def _train(self, side: str, number: int, work: Path) -> dict[str, Any]:
        kind, _, variant = side.partition(":")
        match kind:
            case "base":
                return {}
            case "upstream" | "uncapped":
                return self._upstream(side, work)
            case "winner":
                return self._winner(number, work)
            case _:
                return self._ours(side, self.asked["variants"].get(variant, ""), number, work)

    # — the sides

    def _ours(self, side: str, changes: str, number: int, work: Path) -> dict[str, Any]:
        """Train as in a tournament, with a plan of its own."""
        base, rows, _ = self.files
        work.mkdir()
        profile = work / "profile.yaml"
        written = scale.cell_profile(self.cell, HERE / "profile.yaml", changes, number)
        profile.write_text(yaml.safe_dump(written), encoding="utf-8")
        os.environ[PROFILE_VARIABLE] = str(profile)
        now = time.time()
        end_by = now + self.seconds + scale.PLANNED_START_S
        run = run_spec(self.cell, base, rows, work, end_by, end_by + 60)

        def start(command: Any, env: Any, cwd: Path) -> Any:
            planning = "trainer.runner.prepare" in command
            patch = f"plans_at:{now}" if planning else f"cpu_clock:{self.seconds}"
            return self.forks.start(command, env, cwd, f"benchmarks.text_rules.clock.{patch}")

        runner = PatientRunner(run, StopRequest(Path(run.stop_path)), retries=True, start=start)
        result = runner.execute()
        if not result.submission:
            raise RuntimeError(f"{self.cell.name} {side}: {result.end}: {result.detail}\n{_tail(work)}")
        launch = sorted(work.glob("launch-*"))[-1]
        plan = json.loads((launch / "plan.json").read_text("utf-8"))
        return {
            "steps": result.steps,
            "end": result.end.value,
            "cpu_s": float((launch / USED).read_text("utf-8")),
            "best": result.best and [result.best.value, result.best.step],
            "base": result.base and result.base.value,
            "plan": _shown(plan),
            "notes": [f"{event.kind}: {event.text}" for event in _events(work, "note")],
            "evaluations": [
                [event.score.step, round(event.score.value, 4), round(event.seconds, 2)]
                for event in _events(work, "eval")
            ],
        }

    def _winner(self, number: int, work: Path) -> dict[str, Any]:
        base, rows, _ = self.files
        work.mkdir()
        run = run_spec(self.cell, base, rows, work, 0.0, 0.0)
        ask = scale.peer_ask(self.cell, self.seconds, number) | {"run": json.loads(run.to_json())}
        path = work / "ask.json"
        path.write_text(json.dumps(ask), encoding="utf-8")
        command = [sys.executable, "-m", "benchmarks.text_rules.peer", str(path)]
        return self._waited(command, {}, work)

    def _upstream(self, side: str, work: Path) -> dict[str, Any]:
        base, rows, _ = self.files
        config = upstream.write_config(
            work,
            base,
            World(self.cell.seed).dataset(self.cell.task),
            json.loads(rows.read_text("utf-8")),
            capped=side == "upstream",
            seed=self.cell.seed,
            full=self.cell.method == "full",
            rate_factor=scale.upstream_factor(self.cell),
        )
        command = [sys.executable, "-m", "axolotl.cli.train", str(config)]
        told = self._waited(command, {upstream.SECONDS: str(self.seconds)}, work)
        (work / "output").rename(work.with_name(f"{work.name}-model"))
        return told

    def _waited(self, command: list[str], more: dict[str, str], work: Path) -> dict[str, Any]:
        child = self.forks.start(command, child_environment(work, more, (str(work),)), work)
        until = time.time() + PATIENCE * self.seconds
        while child.ended() is None and time.time() < until:
            time.sleep(0.1)
        child.close()
        reported = work / "told.json"
        if not reported.exists():
            raise RuntimeError(f"{self.cell.name} {work.name} told nothing:\n{_tail(work)}")
        found: dict[str, Any] = json.loads(reported.read_text("utf-8"))
        return found


@cache
def _programs(kind: str) -> str:
    """A digest of all that decides what comes out."""
    kind = "upstream" if kind == "uncapped" else kind
    files = [path for name in (*_COMMON, *_RUNS[kind]) for path in HERE.glob(name)]
    if kind == OURS:
        for package, kinds in (("core", "*.py"), ("trainer", "*.py"), ("configs", "*.yaml")):
            files += (ROOT / package).rglob(kinds)
    return digest_of(files)


class PatientRunner(TextRunner):
    """Ends nothing by real time: the training's own clock counts CPU seconds."""

    @property
    def hard_end(self) -> float:
        return self._started + PATIENCE * (self.run.deadline_at - self.run.end_by)


def _shown(plan: dict[str, Any]) -> dict[str, Any]:
    """Summary of a training for the table."""
    steps, batch, optimizer = plan["steps"], plan["batch"], plan["optimizer"]
    return {
        "rate": optimizer["learning_rate"],
        "batch": batch["micro"] * batch["accumulation"],
        "micro": batch["micro"],
        "steps": [steps["total"], steps["wanted"], steps["per_epoch"]],
        "eval": [steps["eval_every"], steps["eval_rows"]],
        "packing": plan["sequence"]["packing"],
        "length": plan["sequence"]["length"],
        "method": plan["method"],
    }


def _events(work: Path, name: str) -> Iterator[Any]:
    for line in parse_events((work / "progress.jsonl").read_bytes()):
        if line.event is not None and line.event.event == name:
            yield line.event


def _tail(work: Path) -> str:
    log = work / "log"
    return log.read_text("utf-8", "replace")[-4000:] if log.exists() else ""


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
