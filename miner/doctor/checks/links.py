"""Check the links between GPUs: which there are, and how fast the GPUs add up gradients over them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from typing import Any

from core.domain.errors import GodMinerError
from core.domain.hardware import GpuLink, find_kind
from core.planning.time.speed import LINK_SHARE
from miner.backends.build_fleet import scan_once
from miner.backends.choose import AUTOMATIC
from miner.backends.registry import build_backend
from miner.backends.trial import TRIAL_TIMEOUT_S, Trial, run_trial, temporary_data_dir
from miner.doctor.checks.subnet import running_daemon
from miner.doctor.examine import CheckContext, DoctorCheck
from miner.fleet.base import Gpu, InventoryState
from miner.fleet.placement import topology_of
from miner.settings import BackendKind, Settings
from miner.support.findings import Finding, ok, skip, warn

#: Less than this part of what plans count on is worth a look: a slower one makes every plan too hopeful.
ENOUGH = 0.6
#: NCCL's segments, where GPUs cannot reach each other's memory.
SHM_BYTES = 8 * 2**30
WHAT, LINKS = "all-reduce", "links"
_TOPOLOGY = "look at nvidia-smi topo -m and nvidia-smi nvlink --status"


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
    if rate >= ENOUGH * counted_on:
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
    trial = Trial(command, gpus=tuple(gpu.id for gpu in gpus), shm_bytes=SHM_BYTES)

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
