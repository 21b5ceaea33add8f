"""Which settings are fastest here. Every one has a process of its own: one that runs out of memory, or that
changes torch for good, spoils no other."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

from core.plan import TrainingPlan
from trainer.native.levers import LEVERS, Setting
from trainer.sheet import Sheet

#: Faster by less is noise.
WORTH = 1.03
#: A setting that takes longer, compilation included, is given up.
_PATIENCE_S = 1500.0


def sweep(
    sheet: Sheet, plan: TrainingPlan, count: int, wanted: Sequence[str]
) -> Generator[dict[str, Any], None, None]:
    """One lever after the other, each tried upon what was best before it; at the end what to keep."""
    best, kept = plan, dict[str, Any]()
    found = yield from _said("as planned", Setting("", plan, {}), sheet, count, None)
    if "tokens_s" not in found:
        return
    first = fastest = found["tokens_s"]
    for name in wanted:
        chosen: tuple[float, TrainingPlan, dict[str, Any]] | None = None
        for setting in LEVERS[name](best):
            found = yield from _said(f"{name}: {setting.name}", setting, sheet, count, first)
            if found.get("tokens_s", 0.0) > max(fastest * WORTH, chosen[0] if chosen else 0.0):
                chosen = found["tokens_s"], setting.plan, setting.targets
        if chosen is not None:
            fastest, best = chosen[:2]
            kept |= chosen[2]
    yield {"event": "keep", "targets": kept, "tokens_s": fastest, "gain": fastest / first}


def _said(
    name: str, setting: Setting, sheet: Sheet, count: int, first: float | None
) -> Generator[dict[str, Any], None, dict[str, Any]]:
    found = _apart(sheet, setting.plan, count)
    gain = found["tokens_s"] / first if "tokens_s" in found and first else None
    yield {"event": "setting", "name": name, "targets": setting.targets, "gain": gain, **found}
    return found


def _apart(sheet: Sheet, plan: TrainingPlan, count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=sheet.launch_dir) as folder:
        plan_path = Path(folder) / "plan.json"
        plan_path.write_text(plan.to_json(), encoding="utf-8")
        own = sheet.model_copy(update={"plan_path": str(plan_path), "launch_dir": folder})
        command = [sys.executable, "-m", "trainer.native.measure", "one", str(own.write()), str(count)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
        except subprocess.TimeoutExpired:
            return {"failed": f"not done after {_PATIENCE_S:.0f} s"}
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()]
        return {"failed": said[-1][:300] if said else f"ended with {done.returncode}"}
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found
