"""Check what trains: the GPUs, the policy and profile in force, and the backend, with a trial run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from core.domain.errors import ConfigError
from core.profile.explain import ProfileFinding as Remark
from core.profile.explain import ProfileFindingLevel, check_profile
from core.profile.resolve import load_profile, profile_files
from core.recipes.dry_run import check_profile_plan
from miner.backends.build_fleet import scan_once
from miner.backends.choose import AUTOMATIC
from miner.backends.registry import CHECK_LIMIT_S, plugin_of
from miner.doctor.examine import CheckContext, DoctorCheck
from miner.fleet.base import InventoryState
from miner.offers.backtest.policy_check import policy_findings
from miner.offers.policies.load import load_policy, policy_files
from miner.offers.policies.selection import ActiveConfig, active_config
from miner.settings import BackendKind, Settings
from miner.support.findings import Finding, fail, is_healthy, ok, warn

#: A driver that wakes its GPUs first takes long.
SCAN_LIMIT_SECONDS = 40.0


def check_gpus(context: CheckContext) -> Iterator[Finding]:
    fleet, source = scan_once(context.settings)
    yield from gpu_findings(fleet.inventory, source)


def gpu_findings(stock: InventoryState, source: str) -> Iterator[Finding]:
    if stock.problem is not None:
        way = "see that nvidia-smi works for this user, or name the GPUs in GPUS or FLEET_FILE"
        yield fail("gpus", f"they cannot be read: {stock.problem}", way)
        return
    hardware = stock.hardware
    if hardware is None:
        yield fail("gpus", f"none can be used ({source})", "see god-miner fleet show")
    elif hardware.gpus.is_cpu:
        yield warn("gpus", f"a pretended GPU ({source})", "install the NVIDIA driver, or set GPUS")
    else:
        yield ok("gpus", f"{hardware.gpus} ({source})")
    for reason, count in Counter(
        gpu.unusable_reason for gpu in stock.gpus if gpu.unusable_reason is not None
    ).items():
        yield warn("gpus", f"{count} out: {reason}", "see god-miner fleet show")


GPUS_CHECK = DoctorCheck("gpus", check_gpus, SCAN_LIMIT_SECONDS)


def check_tuning(context: CheckContext) -> Iterator[Finding]:
    settings = context.settings
    used: set[Path] = set()
    try:
        active = active_config(settings, scan_once(settings)[0].inventory.installed)
    except ConfigError as error:
        way = "correct it; until then the daemon uses its last good version, or a shipped one, and alerts"
        yield fail("policy and profile", str(error), way)
    else:
        used = {layer.file for config in (active.policy, active.profile) for layer in config.layers}
        yield from tuning_findings(active)
    own = settings.policy_dir
    yield from _unreadable_files("policy", policy_files([own]), own, used, load_policy)
    own = settings.profile_dir
    yield from _unreadable_files("profile", profile_files([own]), own, used, load_profile)


def tuning_findings(active: ActiveConfig) -> Iterator[Finding]:
    """Say what is in force, why, and what `check` finds wrong in it."""
    yield ok("policy", f"{active.policy.name} ({active.policy.file}), because {active.why_policy}")
    yield from _remark_findings(
        "policy", policy_findings(active.policy), f"god-miner policy check {active.policy.name}"
    )
    yield ok("profile", f"{active.profile.name} ({active.profile.file}), because {active.why_profile}")
    checked = check_profile(active.profile, check_profile_plan)
    yield from _remark_findings("profile", checked, f"god-miner profile check {active.profile.name}")


def _remark_findings(word: str, remarks: list[Remark], command: str) -> Iterator[Finding]:
    for remark in remarks:
        if remark.level is ProfileFindingLevel.ERROR:
            yield warn(word, f"{remark.where}: {remark.message}", f"see {command}")


def _unreadable_files(
    word: str,
    files: dict[str, Path],
    directory: Path,
    used: set[Path],
    load: Callable[[str, list[Path]], Any],
) -> Iterator[Finding]:
    """The operator's own files that are not in force, where they cannot be read."""
    for file in files.values():
        if file.parent == directory and file not in used:
            try:
                load(str(file), [directory])
            except ConfigError as error:
                yield warn(word, str(error), f"correct {file}; it is not in force")


TUNING_CHECK = DoctorCheck("policy and profile", check_tuning, SCAN_LIMIT_SECONDS)


def check_backend(context: CheckContext) -> Iterator[Finding]:
    settings = context.settings
    asked = f"BACKEND={','.join(settings.backend)}"
    if not settings.backends:
        yield warn("backend", "BACKEND=none: offers are answered, nothing is trained", "another BACKEND")
    for wanted in settings.backends:
        if wanted.is_cluster:  # it has a check of its own
            yield ok("backend", f"{wanted} ({asked})")
        else:
            kinds = AUTOMATIC if wanted is BackendKind.AUTO else (wanted,)
            yield from _usable_backend(settings, kinds, asked)


def _usable_backend(settings: Settings, kinds: Sequence[BackendKind], asked: str) -> Iterator[Finding]:
    """Yield the findings on the first of these that can be used, or on all if none can."""
    by_kind = {kind: list(plugin_of(kind).check(settings)) for kind in kinds}
    usable = [kind for kind in kinds if is_healthy(by_kind[kind])]
    if not usable:
        for findings in by_kind.values():
            yield from findings
        yield fail(
            "backend",
            f"{' and '.join(kinds)} cannot run a training ({asked})",
            "correct Docker or the local python, as said above; or set MAX_JOBS=0 to refuse all offers",
        )
        return
    yield ok("backend", f"{usable[0]} ({asked})")
    yield from by_kind[usable[0]]


BACKEND_CHECK = DoctorCheck("backend", check_backend, CHECK_LIMIT_S)


def cluster_check(kind: BackendKind) -> DoctorCheck:
    """The check that a cluster's backend brings along."""
    plugin = plugin_of(kind)

    def check(context: CheckContext) -> Iterable[Finding]:
        return plugin.check(context.settings)

    return DoctorCheck(kind, check, plugin.check_limit_s)
