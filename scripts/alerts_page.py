"""Print docs/alerts.md from the schema of rules, the shipped rules and the metrics (make docs)."""

from __future__ import annotations

from core.config import schema_docs
from miner.alerts.metrics import METRICS
from miner.alerts.rules import (
    AlertAction,
    AlertCondition,
    AlertFile,
    AlertRule,
    KindSettings,
    load_alert_rules,
)
from miner.alerts.state import condition_text
from miner.api.alerts import Severity

_INTRO = """\
# Alerts

Rules check measurements every five seconds, and what comes from the database once a minute. The program
also raises alerts itself: a GPU that is out, a hub that refuses. Both are listed together, are events,
count in `god_miner_alerts_total`, and are sent as [notifications](notifications.md).

```sh
god-miner alerts list                 # open alerts, and every rule with what it measures now
god-miner alerts list --all           # also those that are over
god-miner alerts check                # mistakes in your alerts.yaml, with their lines
god-miner alerts test gpu-hot 91      # what a rule would do at this value
god-miner alerts silence 'gpu-*' --subject gpu:GPU-1a2b --for 8h --reason "fan is on its way"
```

## Your own rules

Write `DATA_DIR/alerts.yaml` (or what `ALERTS_FILE` names). It is laid over the shipped rules key by key,
so it names only what it changes. Edits take effect without a restart; after a bad one the last good rules
stay in force, and an alert says so.

```yaml
rules:
  gpu-memory:
    when: {above: 93%}          # the rest as shipped
  gpu-idle:
    off: true
  power-draw:                   # a rule of your own
    when: {metric: gpu.power, above: 650, over: 5m, stat: mean}
    for: 10m
    severity: info
kinds:
  job_failed: {notify: false}   # alerts of the program
```

A rule is pending once its condition is met, and fires when that has lasted for `for`. It is resolved on the
other side of `clear`, when nothing trains there any more, or when the job is over. **No value is not a
good value**: a rule without data stays as it is, and the list says "no data". After a restart open alerts
go on, without a second notification. Silenced alerts are still listed.

Alerts of the program are resolved when what they report is over: a GPU is back, the hotkey can be opened, a
policy, a profile, `alerts.yaml` or FLEET_FILE is in force again. Others close six hours after their last
occurrence.

Two rules see only this miner's own traffic:

- `clock-off` compares this clock with the times that validators sign: the median over validators of the last
  hour. With fewer than two validators there is no value; `god-miner doctor` asks the chain.
- `hub-unreachable` counts the downloads and uploads of jobs. A miner that trains nothing does not notice that
  the hub is out of reach; `god-miner doctor` asks it.

## What rules do

- `batch: -10%`: fewer sequences in one pass, at least one less. The effective batch stays.
- `batch: +20%`: more sequences in one pass, where the plan's memory model allows it, the memory measured
  stays below 85 %, and no pass was made smaller in this attempt.
- `duty: -3%`: the trainer pauses between steps, so that the GPU computes 97 % of the time; never below
  70 %. Once the alert is resolved, the pauses get shorter step by step.

The running training [changes at a step boundary](training.md#changes-while-a-run-goes-on), if its recipe
allows:

| recipe | smaller passes | larger passes | pauses |
|---|---|---|---|
| native | at once | at once | at once |
| Axolotl: instruct, chat, packed | at once, cut between documents | at once; not with a KL term | at once |
| Axolotl: instruct, chat, not packed | at once | no | at once |
| Axolotl: DPO | at once | at once | at once |
| Axolotl: GRPO, mixtures of experts whose balance is trained | the next attempt | no | at once |
| kohya, ai-toolkit | the next attempt | no | no |

Passes larger than planned join a step's micro-batches, so a step must have at least two of them. The next
attempt is never planned with larger passes, since it follows a failure.

After `settle` the action is judged: it is **undone** if the loss rose, if tokens per second fell by more than
`worse` without the rule's number getting better (or by three times that anyway), or if larger passes were
not faster. A rule whose action was undone, refused or not answered, or whose smaller passes saved no memory,
does nothing more in that attempt. There is one action at a time, and at most `times` of a rule per attempt.

`god-miner jobs show N` lists what was done to a job; with `--json` each has its numbers before and after,
as in `god-miner events --kind rule_action` and `GET /jobs/{job}/series`.
"""

_PARTS = (
    ("The file", "", AlertFile),
    ("rules", "", AlertRule),
    ("rules.when", "", AlertCondition),
    ("rules.act", "", AlertAction),
    ("kinds", "", KindSettings),
)


def page() -> str:
    parts = (schema_docs.reference_table(*part) for part in _PARTS)
    return "\n".join([_INTRO, _shipped(), _metrics(), *parts])


def _shipped() -> str:
    rows = []
    for name, rule in load_alert_rules().rules.items():
        act = rule.act
        change = (
            "" if act is None else f"batch {act.batch:+.0%}" if act.batch else f"duty {act.duty or 0:+.0%}"
        )
        only = ", while training" if rule.only else ""
        condition = f"`{rule.when.metric}` {condition_text(rule)}{only}"
        severity = (rule.severity or Severity.WARNING).value
        rows.append((f"`{name}`", condition, severity, change.replace("%", " %"), rule.description))
    columns = ("rule", "condition", "severity", "action", "meaning")
    return schema_docs.section("Shipped rules", "", columns, rows)


def _metrics() -> str:
    rows = [
        (f"`{metric.name}`", metric.scope.value, metric.unit.value, metric.description)
        for metric in METRICS.values()
    ]
    lead = "One value for each of what is named in the second column."
    return schema_docs.section("Metrics", lead, ("metric", "of each", "unit", "what it is"), rows)


if __name__ == "__main__":
    print(page(), end="")
