"""Alert rules: the schema of `alerts.yaml`, and the operator's file laid over the shipped one.

The operator's file needs to name only what it changes: it is merged key by key over the shipped rules,
without `extends`, so that nobody loses a rule by forgetting a line. `off: true` takes a rule out.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, WithJsonSchema, field_validator

from core.config.files import (
    ConfigFileModel,
    ConfigKind,
    ConfigLayer,
    LayeredValues,
    config_dir,
    read_text,
)
from core.config.live import LastGoodLayers, LiveConfig
from core.config.problems import SchemaKeys
from core.config.yaml_lines import KeyPath, LocatedYaml, dotted_path
from core.domain.errors import ConfigError, Problem, nearest_name
from core.domain.records import Record
from core.domain.units import MetricUnit, Seconds, parse_bytes, parse_seconds
from miner.alerts.metrics import METRICS, Metric
from miner.api.alerts import Severity
from miner.observe.alerts import AlertKind, SendAlert

FILE_NAME = "alerts.yaml"
#: Samples are kept for an hour; what is read from the store goes back as far as it does.
MAX_WINDOW_SECONDS = 3600.0
MAX_STORED_WINDOW_SECONDS = 31 * 86_400.0


class WindowStat(StrEnum):
    """The statistic of the values in the window."""

    MEAN = "mean"
    MAX = "max"
    MIN = "min"
    LAST = "last"
    CHANGE = "change"  # the last minus the first


class Threshold(Record):
    """A number with the unit in which it was written."""

    value: float
    unit: MetricUnit | None = None


_PERCENT = re.compile(r"([-+]?\d+(?:\.\d+)?)\s*%")


def _threshold(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"value": float(value)}
    if isinstance(value, str):
        if match := _PERCENT.fullmatch(value.strip()):
            return {"value": float(match[1]) / 100, "unit": MetricUnit.SHARE}
        for parse, unit in ((parse_seconds, MetricUnit.SECONDS), (parse_bytes, MetricUnit.BYTES)):
            try:
                return {"value": float(parse(value)), "unit": unit}
            except ValueError:
                continue
    if isinstance(value, Threshold):
        return value
    raise ValueError(f"a number, or one with its unit, like 90%, 8h or 20GB, is needed, not {value!r}")


_EITHER_NUMBER = WithJsonSchema(
    {"anyOf": [{"type": "number"}, {"type": "string"}], "examples": ["90%", 85, "8h"]}
)
Limit = Annotated[Threshold, BeforeValidator(_threshold), _EITHER_NUMBER]


def _change(value: Any) -> Any:
    match = _PERCENT.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is not None and match[1][0] in "+-":
        return float(match[1]) / 100
    if isinstance(value, float) and -1 < value < 1:
        return value
    raise ValueError(f"a change is written with its sign, like -10% or +20%, not {value!r}")


def _batch_change(value: float) -> float:
    if not -0.5 <= value <= 0.5 or value == 0:
        raise ValueError("at most half of the micro batch is taken or added at once")
    return value


def _duty_change(value: float) -> float:
    if not -0.3 <= value < 0:
        raise ValueError("the duty is lowered, by 30% at most; it comes back by itself")
    return value


_CHANGE = WithJsonSchema({"type": "string", "pattern": r"^[-+]\d+(\.\d+)?%$", "examples": ["-10%"]})
BatchChange = Annotated[float, BeforeValidator(_change), AfterValidator(_batch_change), _CHANGE]
DutyChange = Annotated[float, BeforeValidator(_change), AfterValidator(_duty_change), _CHANGE]


class AlertCondition(Record):
    """The metric and its limits."""

    metric: str | None = Field(default=None, description="What is measured; see the table of metrics.")
    above: Limit | None = Field(default=None, description="The condition is met above this.")
    below: Limit | None = Field(default=None, description="The condition is met below this.")
    clear: Limit | None = Field(
        default=None, description="The alert is resolved on the other side of this. Unset: the threshold."
    )
    over: Seconds | None = Field(
        default=None, description="The window of time that is looked at. Unset: only now."
    )
    stat: WindowStat | None = Field(default=None, description="Of the values in the window. Unset: `mean`.")
    least: int | None = Field(
        default=None, ge=1, description="Fewest values (jobs, requests) in the window. Unset: 1."
    )


class AlertAction(Record):
    """The change that a rule asks of the training that it is about."""

    batch: BatchChange | None = Field(
        default=None,
        description="Sequences in one pass, by at least one; the effective batch stays the same.",
    )
    duty: DutyChange | None = Field(
        default=None, description="Share of the time in which the GPU computes; given back step by step."
    )
    times: int | None = Field(default=None, ge=1, le=20, description="Most actions of an attempt. Unset: 4.")
    settle: Seconds | None = Field(
        default=None, description="After this time an action is judged. Unset: 2m."
    )
    worse: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Loss of tokens per second from which an action that did not help is undone; one that "
        "helped, from three times of it. Unset: 0.1.",
    )


class AlertRule(Record):
    """A rule. A file changes only the values that it names."""

    model_config = ConfigDict(populate_by_name=False)

    description: str = Field(default="", description="For people.")
    when: AlertCondition = Field(default=AlertCondition(), description="The condition.")
    hold: Seconds | None = Field(
        default=None,
        alias="for",
        description="How long it must be met before the alert is raised. Unset: at once.",
    )
    only: Literal["training"] | None = Field(
        default=None, alias="while", description="Only on GPUs, or for jobs, that train at the moment."
    )
    severity: Severity | None = Field(default=None, description="Unset: `warning`.")
    notify: bool | None = Field(default=None, description="Whether to send a notification. Unset: yes.")
    act: AlertAction | None = Field(default=None, description="What to do about it. Unset: nothing.")
    off: bool = Field(default=False, description="Take the rule out.")


class KindSettings(Record):
    """An alert that is raised by the program, not by a rule."""

    severity: Severity | None = Field(default=None, description="Unset: `warning`.")
    notify: bool | None = Field(default=None, description="Unset: yes.")


def _kind(value: str) -> str:
    if value in set(AlertKind):
        return value
    nearest = nearest_name(value, [kind.value for kind in AlertKind], cutoff=0.0)
    raise ValueError(f"no alert of the program is called {value!r}; nearest is {nearest}")


KindName = Annotated[str, AfterValidator(_kind)]
RuleName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]{0,39}$")]


class AlertFile(ConfigFileModel):
    rules: dict[RuleName, AlertRule] = Field(default_factory=dict, description="Rules by name.")
    kinds: dict[KindName, KindSettings] = Field(
        default_factory=dict, description="Alerts of the program, by kind."
    )

    @field_validator("extends")
    @classmethod
    def _always_the_shipped_rules(cls, value: str | None) -> str | None:
        if value is not None:
            raise ValueError("your rules are always laid over the shipped ones; remove the line")
        return value


ALERTS_KIND = ConfigKind(
    "set of alert rules",
    "",
    AlertFile,
    SchemaKeys(
        AlertFile,
        {
            "threshold": "above",
            "greater_than": "above",
            "less_than": "below",
            "window": "over",
            "duration": "for",
            "hysteresis": "clear",
            "action": "act",
            "level": "severity",
            "disabled": "off",
        },
        [(), ("rules", "*"), ("rules", "*", "when"), ("rules", "*", "act")],
    ),
    null_unsets=True,
    may_be_empty=True,
)


class LoadedAlertRules:
    """The rules in force: the shipped ones with the operator's changes."""

    def __init__(self, layers: Sequence[ConfigLayer[AlertFile]]) -> None:
        self.layers = tuple(layers)
        self._values = LayeredValues()
        for layer in layers:
            _add_layer(self._values, layer.located.data or {}, (), layer.located)
        merged = LocatedYaml(layers[-1].file.name)
        merged.data = self._values.nested()
        content = ALERTS_KIND.validated(merged)
        self.rules = {name: rule for name, rule in content.rules.items() if not rule.off}
        self.kinds = content.kinds
        if problems := [*self._problems()]:
            raise ConfigError(layers[-1].file.name, problems)
        text = "\0".join(layer.text for layer in layers)
        self.digest = hashlib.sha256(text.encode()).hexdigest()

    def origin(self, *path: str) -> str:
        """The place where a value, or anything below it, was last written: `alerts.yaml:12`."""
        origins = self._values.origins.items()
        places = [str(origin) for known, origin in origins if known[: len(path)] == path]
        return places[-1] if places else "default"

    def written(self) -> list[tuple[str, Any, str]]:
        """Return every value of the files, as (dotted path, value, place where it was written)."""
        origins = self._values.origins
        return [(dotted_path(path), value, str(origins[path])) for path, value in self._values.values.items()]

    def severity_of_kind(self, kind: str) -> Severity:
        return (self.kinds.get(kind) or KindSettings()).severity or Severity.WARNING

    def notifies(self, name: str) -> bool:
        """Return True if alerts of this rule or kind are passed on."""
        known = self.rules.get(name) or self.kinds.get(name)
        return known is None or known.notify is not False

    def _problems(self) -> list[Problem]:
        problems = []
        for name, rule in self.rules.items():
            for path, value, text in _rule_problems(rule):
                where = self.origin("rules", name, *path) if path else self.origin("rules", name)
                problems.append(Problem(f"{where}: rules.{'.'.join((name, *path))}", value, text))
        return problems


def _rule_problems(rule: AlertRule) -> list[tuple[tuple[str, ...], str, str]]:
    """Return the faults of a rule as a whole: (path, value, rule)."""
    when = rule.when
    metric = METRICS.get(when.metric or "")
    if metric is None:
        if when.metric is None:
            return [(("when",), "", "metric is missing")]
        nearest = nearest_name(when.metric, METRICS, cutoff=0.0)
        return [(("when", "metric"), when.metric, f"no such metric; nearest is {nearest}")]
    problems: list[tuple[tuple[str, ...], str, str]] = []
    if (when.above is None) == (when.below is None):
        problems.append((("when",), "", "either above or below is needed"))
    elif when.clear is not None:
        limit = when.above or when.below
        assert limit is not None
        wrong = when.clear.value > limit.value if when.above else when.clear.value < limit.value
        if wrong:
            side = "at most above" if when.above else "at least below"
            problems.append((("when", "clear"), "", f"must be {side}, or the alert would never be resolved"))
    for key in ("above", "below", "clear"):
        limit = getattr(when, key)
        if limit is not None and (text := _wrong_unit(metric, limit)):
            problems.append((("when", key), "", text))
    longest = MAX_STORED_WINDOW_SECONDS if metric.query else MAX_WINDOW_SECONDS
    if when.over is not None and when.over > longest:
        text = f"values are kept for {longest / 3600:g} h"
        problems.append((("when", "over"), "", text))
    if rule.act is not None and metric.scope not in ("gpu", "job"):
        problems.append((("act",), "", f"only rules about a GPU or a job can act, {metric.name} is neither"))
    if rule.act is not None and (rule.act.batch is None) == (rule.act.duty is None):
        problems.append((("act",), "", "either batch or duty is needed"))
    if rule.only is not None and metric.scope not in ("gpu", "job"):
        problems.append((("while",), "", f"only GPUs and jobs train, {metric.name} is neither"))
    return problems


def _wrong_unit(metric: Metric, limit: Threshold) -> str | None:
    if metric.unit is MetricUnit.SHARE:
        # 90 would be 9000 %, and never reached.
        fine = limit.unit is MetricUnit.SHARE or (limit.unit is None and -1 <= limit.value <= 1)
        return None if fine else f"{metric.name} is a share: write it like 90%"
    if metric.unit in (MetricUnit.SECONDS, MetricUnit.BYTES):
        fine = limit.unit is metric.unit or limit.value == 0
        example = "8h" if metric.unit is MetricUnit.SECONDS else "20GB"
        return None if fine else f"{metric.name} has a unit: write it like {example}"
    return None if limit.unit is None else f"{metric.name} is a plain number ({metric.unit.value})"


def _add_layer(values: LayeredValues, data: Mapping[str, Any], path: KeyPath, source: LocatedYaml) -> None:
    """Merge key by key; `null` takes back what an earlier layer has set."""
    for key, value in data.items():
        if not path and key in ("description", "extends"):
            continue
        inner: KeyPath = (*path, key)
        if value is None:
            values.unset(inner)
        elif isinstance(value, dict) and value:
            # The other side of a threshold would contradict the new one.
            for side, other in (("above", "below"), ("below", "above")):
                if path[:1] == ("rules",) and key == "when" and side in value and other not in value:
                    values.unset((*inner, other))
            _add_layer(values, value, inner, source)
        else:
            values.set(inner, value, source.origin(inner))


def shipped_file() -> Path:
    return config_dir() / FILE_NAME


def load_alert_rules(file: Path | None = None) -> LoadedAlertRules:
    """Load the shipped rules, and the operator's file over them, if any. `ConfigError` has the lines."""
    return LoadedAlertRules(_layers(file))


def alert_rules_of_text(text: str, file: Path) -> LoadedAlertRules:
    """Load the rules as they would be with this text in the operator's file. `ConfigError`."""
    return LoadedAlertRules([_layer(shipped_file()), ConfigLayer(ALERTS_KIND, file, text)])


def _layers(file: Path | None) -> list[ConfigLayer[AlertFile]]:
    files = [shipped_file()]
    if file is not None and file.exists() and file.resolve() != files[0].resolve():
        files.append(file)
    return [_layer(path) for path in files]


def _layer(path: Path) -> ConfigLayer[AlertFile]:
    return ConfigLayer(ALERTS_KIND, path, read_text(path))


class LiveAlertRules:
    """The rules in force, which follow the operator's file. After a bad edit the last good rules stay."""

    def __init__(self, file: Path, last_good: Path, alert: SendAlert) -> None:
        self._file, self._alert = file, alert
        self._last_good = LastGoodLayers(last_good)
        self._live = LiveConfig[LoadedAlertRules](
            lambda name, _: load_alert_rules(Path(name)),
            str(file),
            on_problem=lambda error: self._report(f"the last good rules stay in force: {error}"),
            fallback=self._fallback,
        )

    @property
    def problem(self) -> str | None:
        """The reason why the present file is not in force, or None if it is, or if there is none."""
        problem = self._live.problem
        return str(problem) if problem else None

    def current(self) -> LoadedAlertRules:
        """The rules as last read; no file is checked."""
        return self._live.current

    def refresh(self) -> None:
        """Load edits."""
        rules = self._live.refresh()
        if self._live.problem is None:
            self._last_good.keep(str(self._file), rules.layers)

    def _fallback(self, error: ConfigError) -> LoadedAlertRules:
        layers = self._last_good.layers(str(self._file), ALERTS_KIND)
        rules, instead = None, "what was last good of it"
        if layers is not None:
            try:
                rules = LoadedAlertRules(layers)
            except ConfigError:  # kept by a version with other metrics
                rules = None
        if rules is None:
            rules, instead = load_alert_rules(), "the shipped rules"
        self._report(f"{self._file} cannot be used; {instead} are in force instead: {error}")
        return rules

    def _report(self, text: str) -> None:
        self._alert(AlertKind.ALERTS_PROBLEM, text)
