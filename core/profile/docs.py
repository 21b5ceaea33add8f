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
from core.profile.learning import LrStageTarget
from core.profile.limits import ContainerTargets, ProfileLimits, SlurmTargets, TargetScale
from core.profile.resolve import load_profile, profile_files
from core.profile.schema import Profile, SectionSelector
from core.profile.targets import GpuStep, Targets

_INTRO = """\
# Tuning profiles

A profile says how to train: *targets* (what you want) and *limits* (what is never exceeded). The planner
meets the targets as far as limits, memory and time allow, and reports every concession with its reason.
`god-miner profile schema` prints this page's tables as JSON Schema for your editor.

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

Put the file into `PROFILE_DIR` and set `PROFILE` to its name, or to its path.

```sh
god-miner profile check FILE          # every mistake, with its line
god-miner profile diff h100x4 FILE    # what it changes
god-miner profile explain FILE        # what the engines make of each value
```

**Units are required**: sizes `75GB` (10⁹) or `75GiB` (2³⁰), durations `90m`, `1.5h`, `1h30m`, model sizes
`13B`, bands `<7B`, `7B-13B` (7B but not 13B), `>=70B`. Numbers of pictures have none:
`<10`, `10-28`. `null` removes what an extended profile has set.

**Order, later wins**: defaults; the general parts of each file, oldest ancestor first; every section whose
`when` holds, in the order in which they were first written; then the factors under `scale`. A section of
the same name in a later file changes the earlier one key by key.

A profile may extend the shipped one of its own name. Edits take effect without a restart. A bad edit keeps
the last good profile and raises an alert; if there is none at the start, a shipped profile is used.

**Which profile is used**: `PROFILE`, else the one that the policy names, else one chosen by the GPUs.
`god-miner profile list`, `plan` and `doctor` say which and why. An edit to a profile that is not in use
raises `profile_not_in_force`.
"""

_SCALES = ", ".join(f"`{name}`" for name in TargetScale.model_fields)
_SECTIONS = f"""\
A section applies where all conditions of its `when` hold. Its `targets`, `limits`, `env`, `engine_config` and
`slurm` override the general ones. Its `scale` has factors (above 0, at most 100) on {_SCALES}."""

_PARTS: tuple[tuple[str, str, type[BaseModel]], ...] = (
    ("The file", "", Profile),
    ("targets", "", Targets),
    ("limits", "", ProfileLimits),
    ("container", "Not within sections.", ContainerTargets),
    ("slurm", "Only with `BACKEND=slurm`; each key replaces its setting `SLURM_…`.", SlurmTargets),
    ("sections: when", _SECTIONS, SectionSelector),
    ("targets.gpus_by_size", "", GpuStep),
    ("targets.lanes", "By a name of your choice.", Lane),
    ("targets.lr_stages", "", LrStageTarget),
)

_ENGINE_CONFIG = """\
## engine_config

Raw keys by engine (`axolotl`, `kohya`, `ai-toolkit`, `native`), checked against the engine's schema.
ai-toolkit's keys are dotted paths. The native trainer's are in [native.yaml](../configs/base/native.yaml).
"""


def json_schema() -> dict[str, Any]:
    return schema_docs.editor_schema(Profile)


def markdown() -> str:
    parts = (schema_docs.reference_table(*part) for part in _PARTS)
    return "\n".join([_INTRO, _shipped(), *parts, _ENGINE_CONFIG])


def _shipped() -> str:
    profiles = [load_profile(name) for name in profile_files()]
    rows = [(f"`{each.name}`", each.hardware or "any", each.description) for each in profiles]
    return schema_docs.section("Shipped profiles", "", ("profile", "made for", "what it is"), rows)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(markdown(), encoding="utf-8")
