"""The policy and the profile in force, and all others of the operator's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from core.errors import ConfigError
from core.planning.check import plan_check
from core.profile.explain import Finding as Remark
from core.profile.explain import Level
from core.profile.explain import check as check_profile
from core.profile.load import load_profile, profile_files
from miner.doctor.checks.gpus import LIMIT_SECONDS
from miner.doctor.examine import Check, Surroundings
from miner.doctor.finding import Finding, fail, ok, warn
from miner.fleet.build import look_once
from miner.offers.policies.check import findings
from miner.offers.policies.choice import InForce, in_force
from miner.offers.policies.load import load_policy, policy_files


def run(surroundings: Surroundings) -> Iterator[Finding]:
    settings = surroundings.settings
    used: set[Path] = set()
    try:
        found = in_force(settings, look_once(settings)[0].stock.installed)
    except ConfigError as error:
        way = "mend it; until then the daemon uses what was last good of it, or a shipped one, and alerts"
        yield fail("policy and profile", str(error), way)
    else:
        used = {layer.file for one in (found.policy, found.profile) for layer in one.layers}
        yield from judged(found)
    own = settings.policy_dir
    yield from _others("policy", policy_files([own]), own, used, load_policy)
    own = settings.profile_dir
    yield from _others("profile", profile_files([own]), own, used, load_profile)


def judged(found: InForce) -> Iterator[Finding]:
    """What is in force, why, and what `check` finds wrong with it."""
    yield ok("policy", f"{found.policy.name} ({found.policy.file}), because {found.why_policy}")
    yield from _wrong("policy", findings(found.policy), f"god-miner policy check {found.policy.name}")
    yield ok("profile", f"{found.profile.name} ({found.profile.file}), because {found.why_profile}")
    checked = check_profile(found.profile, plan_check)
    yield from _wrong("profile", checked, f"god-miner profile check {found.profile.name}")


def _wrong(word: str, remarks: list[Remark], command: str) -> Iterator[Finding]:
    for one in remarks:
        if one.level is Level.ERROR:
            yield warn(word, f"{one.where}: {one.message}", f"see {command}")


def _others(
    word: str, files: dict[str, Path], folder: Path, used: set[Path], load: Callable[[str, list[Path]], Any]
) -> Iterator[Finding]:
    """The operator's own files that are not in force, where they cannot be read."""
    for file in files.values():
        if file.parent == folder and file not in used:
            try:
                load(str(file), [folder])
            except ConfigError as error:
                yield warn(word, str(error), f"mend {file}; it is not in force")


CHECK = Check("policy and profile", run, LIMIT_SECONDS)
