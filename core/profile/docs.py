"""`docs/profiles.md` and the JSON Schema, both from the schema itself.

Run `python -m core.profile.docs docs/profiles.md` after a change; a test compares.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from core.config import schema_docs
from core.domain.selectors import Lane
from core.profile.resolve import load_profile, profile_files
from core.profile.schema import EngineConfigs, Profile, ProfileSection, SectionSelector
from core.profile.targets import ContainerTargets, GpuStep, LrStageTarget, ProfileLimits, Targets, TargetScale

_INTRO = """\
# Tuning profiles

A profile says how to run trainings: *targets* (what you want) and *limits* (what is never exceeded). The
planner honours the targets as far as limits, memory and time allow, and reports every concession with the
number that forced it. This page is generated from the schema; `god-miner profile schema` prints the same as
JSON Schema for your editor.

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

Put it into your own profile directory, or give its path. `god-miner profile check FILE` reports every mistake
with its line, `god-miner profile diff h100x4 FILE` what it changes, and `god-miner profile explain FILE` what
today's engines make of each value.

**Numbers have units**: sizes `75GB` (10⁹) or `75GiB` (2³⁰), durations `90m`, `1.5h`, `1h30m`, model sizes
`13B`, bands of sizes `<7B`, `7B-13B` (the lower end belongs to it), `>=70B`. A bare number is rejected where
a unit is needed. `null` takes back what an extended profile has set.

**Order, later wins**: built-in defaults; the general parts of each file, oldest ancestor first; then every
section whose `when` holds, in the order in which they were first written. A section of the same name in a
later file is merged into the earlier one key by key, in its place. Factors under `scale` multiply at the end.

A profile that `extends` its own name means the shipped one: your `h100x4.yaml` may start with
`extends: h100x4`. An edit takes effect without a restart, and so does a file that is added to `PROFILE_DIR`
under the name in force; a bad edit keeps the last good profile and raises an alert. A file that is invalid
when the daemon starts is replaced by its last good version, else by a shipped profile, with an alert.

**Which one is in force**: `PROFILE`, where it is set; else the one that the policy names (`profile:`); else
one chosen by the GPUs. On four H100 that is `h100x4`. `god-miner profile list`, `plan` and `doctor` say which
and why; `profile show`, `explain` and `check` say when a profile is not in force, and so does the daemon when
its file is edited (`profile_not_in_force`).
"""

_PARTS: tuple[tuple[str, str, type[BaseModel]], ...] = (
    ("The file", "", Profile),
    ("targets", "What you want.", Targets),
    ("limits", "What is never exceeded.", ProfileLimits),
    ("container", "The container around a job. General part only.", ContainerTargets),
    ("sections", "Each has a name and these parts.", ProfileSection),
    ("sections: when", "All that is written must hold.", SectionSelector),
    ("sections: scale", "Factors; those of several matching sections multiply.", TargetScale),
    ("targets.gpus_by_size", "A list of these.", GpuStep),
    ("targets.lanes", "By a name of your choice.", Lane),
    ("targets.lr_stages", "A list of these.", LrStageTarget),
    ("engine_config", "Raw keys by engine; checked against the engine's schema.", EngineConfigs),
)


def json_schema() -> dict[str, Any]:
    return schema_docs.editor_schema(Profile)


def markdown() -> str:
    parts = (schema_docs.reference_table(*part) for part in _PARTS)
    return "\n".join([_INTRO, _shipped(), *parts])


def _shipped() -> str:
    profiles = [load_profile(name) for name in profile_files()]
    rows = [(f"`{each.name}`", each.hardware or "any", each.description) for each in profiles]
    return schema_docs.section("Shipped profiles", "", ("profile", "made for", "what it is"), rows)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(markdown(), encoding="utf-8")
