"""Small entries for the checks' tests: repositories with just what a rule looks at."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from miner.tournament.check.entry import CheckedEntry, open_entry
from tests.miner.tournament.repositories import make_repository

#: A Saturday.
NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
#: A small repository that can be prepared, in place of this one.
SMALL = {
    "LICENSE": "Ours\n",
    "core/a.py": "x = 1\n",
    "trainer/b.py": "y = 1\n",
    "miner/c.py": "z = 1\n",
    "tests/test_a.py": "",
    "configs/policies/base.yaml": "{}\n",
    "configs/base/axolotl.yaml": "{}\n",
    "configs/profiles/base.yaml": "description: Base\n",
    "configs/profiles/steady.yaml": "extends: base\ntargets: {lora_r: 64}\n",
    "configs/profiles/cpu-demo.yaml": "extends: base\n",
    "requirements/image.txt": "",
    "dockerfiles/standalone-text-trainer.dockerfile": 'FROM a\nENTRYPOINT ["python"]\n',
}


def open_small(folder: Path, files: Mapping[str, str | bytes], **more: Any) -> CheckedEntry:
    """A repository with these files below `folder`, opened without a network."""
    make_repository(folder / "repository", files)
    return open_again(folder, **more)


def open_again(folder: Path, **more: Any) -> CheckedEntry:
    number = len(list(folder.glob("clones-*")))
    place = folder / f"clones-{number}"
    place.mkdir()
    chosen: dict[str, Any] = {"offline": True, "now": NOW, **more}
    return open_entry(str(folder / "repository"), place, **chosen)
