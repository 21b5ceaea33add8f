"""Check what trains: the GPUs and the links between them, the policy and profile in force, and the backend,
with a trial run."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from core.domain.errors import ConfigError, GodMinerError
from core.domain.hardware import GpuLink, find_kind
from core.planning.time.speed import LINK_SHARE
from core.profile.explain import ProfileFinding as Remark
from core.profile.explain import ProfileFindingLevel, check_profile
from core.profile.resolve import load_profile, profile_files
from core.recipes.dry_run import check_profile_plan
from miner.backends.build_fleet import scan_once
from miner.backends.registry import AUTOMATIC, CHECK_LIMIT_S, build_backend, plugin_of
from miner.backends.trial import TRIAL_TIMEOUT_S, Trial, run_trial, temporary_data_dir
from miner.doctor.checks.subnet import running_daemon
from miner.doctor.examine import CheckContext, DoctorCheck
from miner.fleet.base import Gpu, InventoryState
from miner.fleet.placement import topology_of
from miner.offers.backtest.policy_check import policy_findings
from miner.offers.policies.load import ActiveConfig, active_config, load_policy, policy_files
from miner.settings import BackendKind, Settings
from miner.support.findings import Finding, fail, is_healthy, ok, skip, warn

#: A driver that wakes its GPUs first takes long.
SCAN_LIMIT_SECONDS = 40.0
#: Less than this part of what plans count on is worth a look: a slower one makes every plan too hopeful.
ENOUGH_BANDWIDTH = 0.6
#: NCCL's segments, where GPUs cannot reach each other's memory.
LINKS_SHM_BYTES = 8 * 2**30
WHAT, LINKS = "all-reduce", "links"
_TOPOLOGY = "look at nvidia-smi topo -m and nvidia-smi nvlink --status"


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


def check_links(context: CheckContext) -> Iterator[Finding]:
    stock = scan_once(context.settings)[0].inventory
    if not any(node.sees_memory for node in stock.nodes if not node.name):
        yield skip(WHAT, "no driver reports what GPUs there are and whether they are idle")
        return
    idle = idle_gpus(stock)
    if len(idle) < 2:
        yield skip(WHAT, f"{len(idle)} of {len(stock.gpus)} GPUs are idle and usable; it takes two")
        return
    yield link_finding(idle)
    if running_daemon(context.settings):
        # It would take the measurement for somebody else's use of its GPUs, or give them out meanwhile.
        yield skip(WHAT, "measured only while no daemon runs here, which may give these GPUs out any moment")
        return
    yield all_reduce_finding(idle, _measured(context.settings, idle))


def idle_gpus(stock: InventoryState) -> list[Gpu]:
    """Usable GPUs of this machine that nobody uses: a measurement and a training disturb each other."""
    busy = stock.unclean | stock.shared
    return [gpu for gpu in stock.gpus if not gpu.node and gpu.unusable_reason is None and gpu.id not in busy]


def link_finding(gpus: list[Gpu]) -> Finding:
    """Check for the links that such GPUs come with."""
    known = find_kind(gpus[0].kind.name)
    linked = topology_of(gpus).are_all_linked([gpu.id for gpu in gpus])
    if known is not None and known.link is GpuLink.NVLINK and not linked:
        detail = f"{known.name} come with NVLink to each other, and the driver reports none between some"
        fix = f"{_TOPOLOGY}; on boards with NVSwitch the fabric manager must run (nvidia-fabricmanager)"
        return warn(LINKS, detail, fix)
    return ok(LINKS, f"{len(gpus)} idle GPUs, {'NVLink' if linked else 'not all joined by NVLink'}")


def all_reduce_finding(gpus: list[Gpu], measured: Mapping[str, Any]) -> Finding:
    """Compare what was measured with what plans count on."""
    if "skipped" in measured:
        return skip(WHAT, str(measured["skipped"]))
    if measured.get("backend") == "gloo":
        fix = "see that PyTorch there is made for CUDA, and that its driver is recent enough: nvidia-smi"
        return warn(WHAT, "a training sees none of the GPUs (torch.cuda.is_available() is false)", fix)
    if "problem" in measured:
        detail = f"{measured['problem']}: {measured.get('output') or 'no output'}"
        return warn(
            WHAT, detail, f"{_TOPOLOGY}; docs/troubleshooting.md, NCCL. Until then limits.max_gpus: 1"
        )
    rate, kind = float(measured["bytes_s"]), gpus[0].kind
    pair_only = kind.link is GpuLink.NVLINK_PAIR and len(gpus) > 2
    counted_on = LINK_SHARE * (min(kind.link_bandwidth, 28e9) if pair_only else kind.link_bandwidth)
    detail = (
        f"{measured['processes']} GPUs, {measured['backend']}: {rate / 1e9:.1f} GB/s; "
        f"plans count on {counted_on / 1e9:.0f} GB/s"
    )
    if rate >= ENOUGH_BANDWIDTH * counted_on:
        return ok(WHAT, detail)
    peers = "" if measured.get("peer_access") else "; the GPUs cannot reach each other's memory"
    fix = f"{_TOPOLOGY}; see that NCCL_P2P_DISABLE is not set, and that ACS is off (docs/troubleshooting.md)"
    return warn(WHAT, f"{detail}{peers}", fix)


def _measured(settings: Settings, gpus: list[Gpu]) -> Mapping[str, Any]:
    """Run `trainer.runner.check_links` as a training; what it printed, or why there was no way to."""
    local = settings.local_backend
    if local is None or local is BackendKind.NONE:
        return {"skipped": f"BACKEND={','.join(settings.backend)}: nothing is trained here"}
    kinds = AUTOMATIC if local is BackendKind.AUTO else (local,)
    command = ("python", "-m", "trainer.runner.check_links")
    trial = Trial(command, gpus=tuple(gpu.id for gpu in gpus), shm_bytes=LINKS_SHM_BYTES)

    async def run(kind: BackendKind) -> str:
        with temporary_data_dir(settings) as temporary:
            backend = await build_backend(settings, kind, temporary.data_dir)
            try:
                return await run_trial(backend, temporary.data_dir, trial)
            finally:
                await backend.close()

    problems = []
    for kind in kinds:
        try:
            output = asyncio.run(run(kind))
        except GodMinerError as error:
            problems.append(f"{kind}: {error}")
            continue
        lines = [line for line in output.splitlines() if line.startswith("{")]
        try:
            answer: Mapping[str, Any] = json.loads(lines[-1])
            return answer
        except (ValueError, LookupError):
            return {"problem": "it printed no result", "output": output[-500:]}
    return {"skipped": f"nothing here can run it; {'; '.join(problems)}"}


LINKS_CHECK = DoctorCheck("links", check_links, TRIAL_TIMEOUT_S + 60.0)
