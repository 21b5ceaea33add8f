"""The report of a rehearsal, as data and as text of 80 columns, and the review of the public log."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from core.domain.tournament_rules import AS_OF, BUILD_LIMIT_S
from core.domain.units import show_bytes, show_seconds
from miner.tournament.rehearsal.build import Build
from miner.tournament.rehearsal.container import ContainerEnd

# — the public log

#: Values of variables with such names are secrets.
_SECRET_NAMES = re.compile(r"TOKEN|SECRET|PASSWORD|_KEY$", re.IGNORECASE)
_SECRETS = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{30,}|\bAKIA[A-Z0-9]{16}\b"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----|://[^/\s:@]+:[^/\s:@]+@"
)
#: A setting of the training with its value, in any of the forms in which configurations and logs have it.
_PLAN_WORDS = (
    r"learning[-_]?rate|lr|lora[-_ ]?(?:r|alpha|rank|dropout)|rank|linear_alpha|network[-_](?:dim|alpha)"
    r"|(?:micro_|per_device_\w+_|train_)?batch[-_ ]?size|gradient_accumulation(?:_steps)?"
    r"|(?:num_|train_)*epochs?"
    r"|(?:max_)?(?:train_)?steps|warmup(?:_steps|_ratio)?|weight_decay|optimi[sz]er|lr_scheduler\w*|scheduler"
    r"|(?:max_)?grad_norm|sequence_len|seq_len|neftune\w*|caption_dropout\w*|num_repeats|beta"
)
_PLAN = re.compile(
    rf"(?<![A-Za-z0-9_])[\"']?(?:{_PLAN_WORDS})[\"']?\s*(?:[:=]|\bis\b|\bof\b)\s*[\"']?[-+]?[\w.]+"
    rf"|\b(?:rank|lr|learning[- ]rate|batch[- ]size|lora[- ]alpha)\s+\d[\d.e-]*"
    rf"|\b(?:step|epoch)s? \d+/\d+|\b\d[\d,]*\s+steps\b|\b\d[\d.]*\s+epochs\b",
    re.IGNORECASE,
)
_SHOWN = 160


class LogFindingKind(StrEnum):
    SECRET = "secret"  # noqa: S105 - a kind of finding
    PLAN = "plan"


@dataclass(frozen=True)
class LogFinding:
    kind: LogFindingKind
    line: int
    #: Without the secret itself.
    text: str


def secret_values(environment: Mapping[str, str]) -> set[str]:
    """The values in an environment that nobody may see; very short ones are found everywhere."""
    return {value for name, value in environment.items() if _SECRET_NAMES.search(name) and len(value) >= 8}


def review_log(lines: Iterable[str], secrets: Collection[str] = ()) -> list[LogFinding]:
    """Find what should not be in a container's log, at most one finding per line."""
    found: list[LogFinding] = []
    for number, line in enumerate(lines, 1):
        hidden = line
        for value in secrets:
            hidden = hidden.replace(value, "***")
        hidden = _SECRETS.sub("***", hidden)
        if hidden != line:
            found.append(LogFinding(LogFindingKind.SECRET, number, hidden.strip()[:_SHOWN]))
        elif match := _PLAN.search(line):
            start = max(0, match.start() - _SHOWN // 2)
            found.append(LogFinding(LogFindingKind.PLAN, number, line[start : start + _SHOWN].strip()))
    return found


#: Our own steps of a build should take no longer on two cores.
OWN_STEPS_S = 300.0
_WIDTH = 80


@dataclass(frozen=True, slots=True)
class KilledTraining:
    """One more training, killed after its first submission."""

    #: Seconds from its start, if it submitted.
    first_submission_s: float | None
    killed_s: float
    #: Why nothing is left that scores, or why nothing was killed.
    problem: str | None

    def summary(self) -> str:
        if self.problem is None:
            return f"killed after {show_seconds(self.killed_s)}: the output folder holds a model that scores"
        return f"kill after {show_seconds(self.killed_s)}: {self.problem}"


@dataclass
class TaskRehearsal:
    """One task, from the build of its image to the score."""

    name: str
    dockerfile: str
    hours: float
    attempts: list[ContainerEnd] = field(default_factory=list)
    #: Of the first attempt that submitted: from its start to its submission; None if none came.
    first_submission_s: float | None = None
    uploaded: list[str] = field(default_factory=list)
    upload_bytes: int = 0
    rewritten: list[str] = field(default_factory=list)
    #: What `scoring` found; None if there was nothing to score.
    score: dict[str, object] | None = None
    score_text: str = ""
    #: The opponent's training on the same inputs, if there was one: its problems are not ours.
    opponent: TaskRehearsal | None = None
    kill: KilledTraining | None = None
    log_lines: int = 0
    log_findings: list[LogFinding] = field(default_factory=list)
    #: What differs from a validator's run.
    deviations: list[str] = field(default_factory=list)
    #: Why it failed.
    problems: list[str] = field(default_factory=list)
    #: What would pass and is worth knowing.
    warnings: list[str] = field(default_factory=list)
    seconds: float = 0.0
    #: Whether all of its parts were done, or failed.
    complete: bool = False

    @property
    def passed(self) -> bool:
        return self.complete and not self.problems

    def as_dict(self) -> dict[str, object]:
        return {
            "task": self.name,
            "complete": self.complete,
            "passed": self.passed,
            "problems": self.problems,
            "warnings": self.warnings,
            "deviations": self.deviations,
            "dockerfile": self.dockerfile,
            "hours": self.hours,
            "attempts": [
                {
                    "exit_code": end.exit_code,
                    "seconds": round(end.seconds, 2),
                    "timed_out": end.timed_out,
                    "out_of_memory": end.out_of_memory,
                }
                for end in self.attempts
            ],
            "first_submission_s": self.first_submission_s,
            "upload": {
                "files": self.uploaded,
                "bytes": self.upload_bytes,
                "rewritten": self.rewritten,
            },
            "score": self.score,
            "opponent": self.opponent.as_dict() if self.opponent else None,
            "kill": asdict(self.kill) if self.kill else None,
            "log": {
                "lines": self.log_lines,
                "findings": [
                    {"kind": str(one.kind), "line": one.line, "text": one.text} for one in self.log_findings
                ],
            },
            "seconds": round(self.seconds, 2),
        }


@dataclass
class OpponentClone:
    """The other entry of a rehearsal, and its images."""

    source: str
    commit: str
    builds: list[Build] = field(default_factory=list)


@dataclass
class Rehearsal:
    """All tasks of one commit."""

    source: str
    commit: str
    clone_seconds: float
    clone_bytes: int
    builds: list[Build] = field(default_factory=list)
    tasks: list[TaskRehearsal] = field(default_factory=list)
    opponent: OpponentClone | None = None
    output: str = ""
    seconds: float = 0.0
    #: False: it still runs, or was interrupted.
    complete: bool = False

    @property
    def passed(self) -> bool:
        return self.complete and all(task.passed for task in self.tasks)

    def as_dict(self) -> dict[str, object]:
        return {
            "complete": self.complete,
            "passed": self.passed,
            "rules_as_of": AS_OF,
            "source": self.source,
            "commit": self.commit,
            "clone": {"seconds": round(self.clone_seconds, 2), "bytes": self.clone_bytes},
            "builds": [_build_as_dict(build) for build in self.builds],
            "tasks": [task.as_dict() for task in self.tasks],
            "opponent": None
            if self.opponent is None
            else {
                "source": self.opponent.source,
                "commit": self.opponent.commit,
                "builds": [_build_as_dict(build) for build in self.opponent.builds],
            },
            "output": self.output,
            "seconds": round(self.seconds, 2),
        }


def _build_as_dict(build: Build) -> dict[str, object]:
    return {
        "dockerfile": build.dockerfile,
        "problem": build.problem,
        "seconds": round(build.seconds, 2),
        "own_seconds": round(build.own_seconds, 2),
        "base_seconds": round(build.base_seconds, 2),
        "limit_s": BUILD_LIMIT_S,
        "bytes": build.size_bytes,
        "steps": [
            {"number": step.number, "seconds": round(step.seconds, 2), "instruction": step.instruction}
            for step in build.steps
        ],
        "tail": build.tail if build.problem else [],
    }


def report_lines(report: Rehearsal) -> Iterator[str]:
    """The report for people."""
    clone = f"cloned in {show_seconds(report.clone_seconds)}, {show_bytes(report.clone_bytes)}"
    yield from _wrapped(f"{report.source} at {report.commit[:12]}: {clone}")
    for build in report.builds:
        yield ""
        yield from _build_lines(build)
    for task in report.tasks:
        yield ""
        yield from _task_lines(task)
    yield ""
    failed = [task.name for task in report.tasks if not task.passed]
    verdict = f"failed: {', '.join(failed)}" if failed else "passed"
    if any(task.problems or task.warnings or task.deviations for task in report.tasks):
        yield "- why a task failed; ! passes, and is worth knowing; ~ not as validators do it"
    yield from _wrapped(f"{verdict} in {show_seconds(report.seconds)}, by the rules of {AS_OF}")
    yield f"report and logs: {report.output}"


def _build_lines(build: Build) -> Iterator[str]:
    if build.problem:
        yield from _wrapped(f"{build.dockerfile}: {build.problem}")
        for line in build.tail[-10:]:
            yield f"  | {line[: _WIDTH - 4]}"
    else:
        yield from _wrapped(
            f"{build.dockerfile}: built in {show_seconds(build.seconds)} of {show_seconds(BUILD_LIMIT_S)}, "
            f"{show_bytes(build.size_bytes)}"
        )
    own = f"own steps {show_seconds(build.own_seconds)}"
    slow = f" (more than {show_seconds(OWN_STEPS_S)})" if build.own_seconds > OWN_STEPS_S else ""
    yield f"  {own}{slow}, base images {show_seconds(build.base_seconds)}; the slowest steps:"
    slowest = sorted(build.steps, key=lambda step: -step.seconds)[:5]
    for step in sorted(slowest, key=lambda step: step.number):
        yield f"  {show_seconds(step.seconds):>8}  {step.number:>2} {step.instruction}"[:_WIDTH]


def _task_lines(task: TaskRehearsal) -> Iterator[str]:
    yield from _wrapped(f"{task.name}: {'passed' if task.passed else 'FAILED'}, {task.hours:g} hours given")
    for number, end in enumerate(task.attempts, 1):
        how = "killed at its limit" if end.timed_out else f"exit code {end.exit_code}"
        memory = ", out of memory" if end.out_of_memory else ""
        yield f"  attempt {number}: {how} after {show_seconds(end.seconds)}{memory}"
    if task.first_submission_s is not None:
        first = show_seconds(task.first_submission_s)
        yield f"  first submission after {first}; a kill before it leaves nothing to upload"
    if task.uploaded:
        yield from _wrapped(
            f"would be uploaded: {show_bytes(task.upload_bytes)}, {', '.join(task.uploaded)}", indent="  "
        )
    if task.rewritten:
        yield from _wrapped(f"the uploader changes {'; '.join(task.rewritten)}", indent="  ")
    for text in (task.score_text, task.kill.summary() if task.kill else ""):
        for line in text.splitlines():
            yield from _wrapped(line, indent="  ")
    if task.score and task.score.get("rows"):
        yield f"  scored on {task.score['rows']} rows that it was not trained on"
    if task.log_lines and not task.log_findings:
        yield f"  the public log: {task.log_lines} lines, no secret and nothing of the plan found"
    for text in task.problems:
        yield from _wrapped(f"- {text}", indent="  ")
    for text in task.warnings:
        yield from _wrapped(f"! {text}", indent="  ")
    for text in task.deviations:
        yield from _wrapped(f"~ {text}", indent="  ")


def log_problems(findings: Sequence[LogFinding]) -> tuple[list[str], list[str]]:
    """Problems and warnings of a log."""
    problems: list[str] = []
    warnings: list[str] = []
    for kind, texts, what in (
        (LogFindingKind.SECRET, problems, "the public log shows a secret"),
        (LogFindingKind.PLAN, warnings, "the public log shows competitors how it is trained"),
    ):
        lines = [one for one in findings if one.kind is kind]
        if lines:
            texts.append(
                f"{what}, {len(lines)} lines; the first is line {lines[0].line}: {lines[0].text[:200]}"
            )
    return problems, warnings


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(
        text, _WIDTH, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False
    )
