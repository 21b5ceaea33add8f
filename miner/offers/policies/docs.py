"""`docs/policies.md` and the JSON Schema, both from the schema itself.

Run `python -m miner.offers.policies.docs docs/policies.md` after a change; a test compares.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from core.layers import tables
from core.profile.schema import When
from miner.offers.policies.load import load_policy, policy_files
from miner.offers.policies.schema import (
    Experience,
    Fitting,
    Policy,
    Rules,
    Scoring,
    Success,
    Value,
    Weights,
)

_INTRO = """\
# Acceptance policies

A policy says which offers are taken: *rules* that none may break, a *score* that must be reached, chances of
*success*, and what a task is worth. [acceptance.md](acceptance.md) tells how a decision comes about and how
to tune it; this page is generated from the schema, `god-miner policy schema` prints the same as JSON Schema
for your editor.

```yaml
extends: h100x4            # everything else as there
rules:
  hours:
    instruct: 12           # or InstructTextTask, as validators spell it
  models_denied: ["*/broken-*"]
  blackout: ["Sun 03:00-05:00"]
score:
  threshold: 0.5
```

Put it into `POLICY_DIR` and set `POLICY` to its name, or give its path. `god-miner policy check FILE` tells
every mistake with its line, `god-miner policy diff h100x4 FILE` what it changes, and
`god-miner policy backtest --policy FILE` what it would have done with the offers that came.

Sizes are written `13B`, bands of sizes `<7B`, `7B-13B` (the lower end belongs to it), `>=70B`, durations
`90m`, `1.5h`, `14d`. A policy that extends another is laid over it key by key; tables by size are replaced
as a whole, and `null` takes back what the extended policy has set. A policy that `extends` its own name means
the shipped one. An edit takes effect without a restart; a bad edit, or a file that goes away, keeps the last
good policy and raises an alert. The settings `TASK_TYPES`, `MAX_HOURS` and `MAX_JOBS` win over whatever the
policy says.
"""

_PARTS: tuple[tuple[str, str, type[BaseModel]], ...] = (
    ("The file", "", Policy),
    ("rules", "An offer that breaks one is refused, whatever its score.", Rules),
    ("rules.experience", "By a name of your choice.", Experience),
    ("rules.experience: when", "All that is written must hold.", When),
    ("fitting", "How an accepted task gets its GPUs.", Fitting),
    ("score", "The sum of weight × factor; each factor lies between 0 and 1.", Scoring),
    ("score.weights", "What each factor adds at most.", Weights),
    ("success", "The chances of publishing a valid model, and how own history moves them.", Success),
    ("value", "What a task is worth.", Value),
)


def json_schema() -> dict[str, Any]:
    return tables.json_schema(Policy)


def markdown() -> str:
    return "\n".join([_INTRO, _shipped(), *(tables.table(*part) for part in _PARTS)])


def _shipped() -> str:
    lines = [
        "## Shipped policies",
        "",
        "| policy | made for | goes with profile | what it is |",
        "|---|---|---|---|",
    ]
    for name in policy_files():
        policy = load_policy(name)
        made_for, profile = policy.hardware or "any", policy.profile or "any"
        lines.append(f"| `{name}` | {made_for} | {profile} | {policy.description} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(markdown(), encoding="utf-8")
