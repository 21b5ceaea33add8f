"""Write `docs/policies.md` and the JSON Schema from the schema of policies.

Run `python -m miner.offers.policies.docs docs/policies.md` after a change; a test compares.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from core.config import schema_docs
from core.profile.schema import SectionSelector
from miner.offers.policies.load import load_policy, policy_files
from miner.offers.policies.schema import (
    ExperienceRule,
    FitTerms,
    Policy,
    PolicyRules,
    ScoreTerms,
    ScoreWeights,
    SuccessTerms,
    ValueTerms,
)

_INTRO = """\
# Acceptance policies

A policy says which offers are accepted: *rules* that none may break, a *score* that must be reached, chances
of *success*, and what a task is worth. [acceptance.md](acceptance.md) explains how a decision is made and how
to tune it; this page is generated from the schema, and `god-miner policy schema` prints the same as JSON
Schema for your editor.

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

Put it into `POLICY_DIR` and set `POLICY` to its name, or to its path. `god-miner policy check FILE` shows
every mistake with its line, `god-miner policy diff h100x4 FILE` what it changes, and
`god-miner policy backtest --policy FILE` what it would have done with past offers.

Sizes are written `13B`, bands of sizes `<7B`, `7B-13B` (the lower end belongs to it), `>=70B`, durations
`90m`, `1.5h`, `14d`. A policy that extends another replaces it key by key; tables by size are replaced as a
whole, and `null` takes back what the extended policy has set. A policy that `extends` its own name means
the shipped one. An edit takes effect without a restart; a bad edit, or a file that goes away, keeps the last
good policy and raises an alert. The settings `TASK_TYPES`, `MAX_HOURS` and `MAX_JOBS` win over whatever the
policy says.
"""

_PARTS: tuple[tuple[str, str, type[BaseModel]], ...] = (
    ("The file", "", Policy),
    ("rules", "An offer that breaks one is refused, whatever its score.", PolicyRules),
    ("rules.experience", "By a name of your choice.", ExperienceRule),
    ("rules.experience: when", "All that is written must match.", SectionSelector),
    ("fitting", "How an accepted task gets its GPUs.", FitTerms),
    ("score", "The sum of weight × factor; each factor lies between 0 and 1.", ScoreTerms),
    ("score.weights", "What each factor adds at most.", ScoreWeights),
    ("success", "The chances of publishing a valid model, and how own history changes them.", SuccessTerms),
    ("value", "What a task is worth.", ValueTerms),
)


def json_schema() -> dict[str, Any]:
    return schema_docs.editor_schema(Policy)


def markdown() -> str:
    return "\n".join([_INTRO, _shipped(), *(schema_docs.reference_table(*part) for part in _PARTS)])


def _shipped() -> str:
    policies = [load_policy(name) for name in policy_files()]
    rows = [
        (f"`{each.name}`", each.hardware or "any", each.profile or "any", each.description)
        for each in policies
    ]
    columns = ("policy", "made for", "goes with profile", "what it is")
    return schema_docs.section("Shipped policies", "", columns, rows)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(markdown(), encoding="utf-8")
