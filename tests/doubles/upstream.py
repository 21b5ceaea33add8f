"""A stand-in for upstream's files of constants, on loopback or in a folder: made of our facts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from core.domain.tournament_rules import FACTS, Fact
from miner.tournament.check.licence import digest_of
from tests.doubles.flaky import FlakyServer, Reply, Request

_LICENCE = b"A licence.\n"
#: Our facts, with the licence of the stand-in.
UPSTREAM_FACTS = tuple(
    replace(fact, value=digest_of(_LICENCE)) if fact.constant == "digest" else fact for fact in FACTS
)


def upstream_files(changed: Mapping[str, object] | None = None) -> dict[str, bytes]:
    """Every file that is watched, by its path; `changed` has other values by upstream's names."""
    texts: dict[str, list[str]] = {}
    for fact in UPSTREAM_FACTS:
        if fact.constant is not None:
            value = (changed or {}).get(fact.constant, _theirs(fact))
            texts.setdefault(fact.source.path, []).append(_line(fact, value))
    files = {path: _joined(path, lines).encode() for path, lines in texts.items()}
    return {**files, "LICENSE.md": _LICENCE, "NOTICE": _LICENCE}


def _joined(path: str, lines: list[str]) -> str:
    """One file of all its values; those of JSON are keys of one object."""
    if not path.endswith(".json"):
        return "\n".join(["", *lines, ""])
    parts = [json.loads(line) for line in lines]
    return json.dumps(parts[0] if len(parts) == 1 else {key: one[key] for one in parts for key in one})


def write_upstream(folder: Path, changed: Mapping[str, object] | None = None) -> Path:
    for path, content in upstream_files(changed).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


def _theirs(fact: Fact) -> object:
    value = fact.value
    if isinstance(value, frozenset):
        return sorted(value)
    return round(value / fact.unit) if fact.unit != 1 and isinstance(value, float) else value


def _line(fact: Fact, value: object) -> str:
    """Write a value in the way that upstream writes such values."""
    if fact.constant == "*":
        return json.dumps(value)
    if fact.source.path.endswith(".json"):
        outer, _, inner = str(fact.constant).partition(".")
        if not inner:
            return json.dumps({outer: value})
        return json.dumps({outer: [{inner: one} for one in value]})  # type: ignore[attr-defined]
    if fact.constant in ("EnvironmentName", "ImageModelType"):
        members = "".join(f"    {one.upper().replace('-', '_')} = {one!r}\n" for one in value)  # type: ignore[attr-defined]
        return f'class {fact.constant}(str, Enum):\n    """Names."""\n\n{members}'
    if fact.constant == "FORCED_R1_ENVIRONMENT":
        return f"{fact.constant}: EnvironmentName | None = EnvironmentName.{str(value).upper()}"
    if fact.constant == "DAILY_ALPHA_TO_MINERS":
        return (
            f"PER_SECOND = 1.0 / 12.0\nDAY = 86400.0\n{fact.constant} = PER_SECOND * DAY * {value!r} / 7200"
        )
    if fact.constant == "FINAL_ROUND_IMAGE_TASK_DISTRIBUTION":
        names = {one.upper().replace("-", "_"): count for one, count in value.items()}  # type: ignore[attr-defined]
        return f"{fact.constant} = {{{', '.join(f'Family.{one}: {count}' for one, count in names.items())}}}"
    return f"{fact.constant} = {value!r}  # as it is".replace("inf,", 'float("inf"),')


class UpstreamSite(FlakyServer):
    """Upstream's files below an address."""

    def __init__(self, changed: Mapping[str, object] | None = None) -> None:
        super().__init__(doors=2)
        self.files = upstream_files(changed)

    def answer(self, request: Request) -> Reply:
        content = self.files.get(request.path.lstrip("/"))
        return Reply(404) if content is None else Reply(200, {"Content-Type": "text/plain"}, content)
