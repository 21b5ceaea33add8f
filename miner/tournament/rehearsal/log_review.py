"""Read a training's log as competitors do: every line of a tournament's container is public.

No secret may be in it, and nothing that shows how the model was trained.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

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
    """What of a container's log should not be there, at most one finding per line."""
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
