"""Write `docs/policies.md` and the JSON Schema from the schema of policies.

Run `python -m miner.offers.policies.docs docs/policies.md` after a change; a test compares.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import BaseModel

from core.config import schema_docs
from miner.offers.policies.load import load_policy, policy_files
from miner.offers.policies.schema import (
    ExperienceRule,
    FitTerms,
    Goal,
    Policy,
    PolicyRules,
    PolicyTargets,
    ScoreTerms,
    ScoreWeights,
    SuccessTerms,
    ValueTerms,
)

_INTRO = """\
# Acceptance policies

A policy decides which offers are accepted. [acceptance.md](acceptance.md) explains the decision and how to
tune it. `god-miner policy schema` prints this page's tables as JSON Schema for your editor.

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

Put the file into `POLICY_DIR` and set `POLICY` to its name, or to its path.

```sh
god-miner policy check FILE               # every mistake, with its line
god-miner policy diff h100x4 FILE         # what it changes
god-miner policy backtest --policy FILE   # what it would have done with past offers
```

Write sizes as `13B`, bands as `<7B`, `7B-13B` (includes 7B, not 13B) or `>=70B`, durations as `90m`, `1.5h`
or `14d`. A policy replaces the one that it extends key by key, tables by size as a whole; `null` removes a
value. A policy may extend the shipped one of its own name. Edits take effect without a restart. After a bad
edit, or if the file disappears, the last good policy stays in use and an alert is raised. `TASK_TYPES`,
`MAX_HOURS` and `MAX_JOBS` apply whatever the policy says.
"""

_PARTS: tuple[tuple[str, str, type[BaseModel]], ...] = (
    ("The file", "", Policy),
    ("rules", "An offer that breaks one is refused.", PolicyRules),
    (
        "rules.experience",
        "`when` has the keys of [a profile's section](profiles.md#sections-when).",
        ExperienceRule,
    ),
    ("fitting", "How an accepted task gets its GPUs.", FitTerms),
    ("score", "The sum of weight × factor, each factor from 0 to 1.", ScoreTerms),
    ("score.weights", "Most that each factor adds.", ScoreWeights),
    ("success", "The chance of publishing a valid model.", SuccessTerms),
    ("value", "What a task is worth.", ValueTerms),
    (
        "targets",
        "What [reports](reports.md) compare with; no decision depends on it.",
        PolicyTargets,
    ),
    ("targets.goals", "Shown as progress.", Goal),
)


def json_schema() -> dict[str, object]:
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
