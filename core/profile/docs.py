"""`docs/profiles.md` and the JSON Schema, both from the schema itself.

Run `python -m core.profile.docs docs/profiles.md` after a change; a test compares.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from core.layers import tables
from core.profile.annotation_rules import RULES
from core.profile.load import load_profile, profile_files
from core.profile.schema import EngineConfigs, Profile, Section, When
from core.profile.targets import ContainerTargets, GpuStep, Lane, Limits, LrStageTarget, Scale, Targets

_INTRO = """\
# Tuning profiles

A profile says how trainings are to be run: *targets* (what you want) and *limits* (what is never exceeded).
The planner keeps to the targets as far as limits, memory and clock allow, and reports every step back with
the number that forced it. This page is generated from the schema; `god-miner profile schema` prints the same
as JSON Schema for your editor.

```yaml
extends: h100x4            # everything else as there
targets:
  lora_r: 256
limits:
  gpu_memory: 70GB
sections:
  long-chats:              # a name of your choice
    when: {task: chat, size: ">=13B"}
    targets: {sequence_len: 4096}
    scale: {learning_rate: 0.5}
```

Put it into your own profile directory, or give its path. `god-miner profile check FILE` tells every mistake
with its line, `god-miner profile diff h100x4 FILE` what it changes, and `god-miner profile explain FILE` what
today's engines make of each value.

**Units are words**: sizes `75GB` (10⁹) or `75GiB` (2³⁰), durations `90m`, `1.5h`, `1h30m`, model sizes `13B`,
bands of sizes `<7B`, `7B-13B` (the lower end belongs to it), `>=70B`. A bare number is refused where a unit
is needed. `null` takes back what an extended profile has set.

**Order, later wins**: built-in defaults; the general parts of each file, oldest ancestor first; then every
section whose `when` holds, in the order in which they were first written. A section of the same name in a
later file is laid over the earlier one, key by key, in its place. Factors under `scale` multiply at the very
end.

A profile that `extends` its own name means the shipped one: your `h100x4.yaml` may start with
`extends: h100x4`. An edit takes effect without a restart, and so does a file that is added to `PROFILE_DIR`
under the name in force; a bad edit keeps the last good profile and raises an alert. A file that is broken
when the daemon starts gives way to what was last good of it, else to a shipped profile, with an alert.

**Which one is in force**: `PROFILE`, where it is set; else the one that the policy names (`profile:`); else
by the GPUs. On four H100 that is `h100x4`. `god-miner profile list`, `plan` and `doctor` say which and why;
`profile show`, `explain` and `check` say so of a profile that is not, and the daemon does when such a file is
edited (`profile_not_in_force`).
"""

_PARTS: tuple[tuple[str, str, type[BaseModel]], ...] = (
    ("The file", "", Profile),
    ("targets", "What you want.", Targets),
    ("limits", "What is never exceeded.", Limits),
    ("container", "The container around a job. General part only.", ContainerTargets),
    ("sections", "Each has a name and these parts.", Section),
    ("sections: when", "All that is written must hold.", When),
    ("sections: scale", "Factors; those of several matching sections multiply.", Scale),
    ("targets.gpus_by_size", "A list of these.", GpuStep),
    ("targets.lanes", "By a name of your choice.", Lane),
    ("targets.lr_stages", "A list of these.", LrStageTarget),
    ("engine_config", "Raw keys by engine; checked against the engine's schema.", EngineConfigs),
)


def json_schema() -> dict[str, Any]:
    return tables.json_schema(Profile)


def markdown() -> str:
    parts = [_INTRO, _shipped(), *(tables.table(*part) for part in _PARTS), _effects()]
    return "\n".join(parts)


def _shipped() -> str:
    lines = ["## Shipped profiles", "", "| profile | made for | what it is |", "|---|---|---|"]
    for name in profile_files():
        profile = load_profile(name)
        lines.append(f"| `{name}` | {profile.hardware or 'any'} | {profile.description} |")
    return "\n".join([*lines, ""])


def _effects() -> str:
    lines = [
        "## What today's engines make of it",
        "",
        "`god-miner profile explain` shows the lines of this table that apply to a profile's own values.",
        "",
        "| key | effect | what happens |",
        "|---|---|---|",
    ]
    lines += [f"| `{rule.path}` | {rule.effect} | {tables.cell(rule.text)} |" for rule in RULES]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(markdown(), encoding="utf-8")
