"""Ask NVML about the GPUs, in a process that exists for nothing else.

`miner.fleet.nvml` starts it; every line on its input is "scan" or "sample", every line on its output an
answer. A faulty driver can hang any call for ever, where no signal ends it: here that costs a process, in the
daemon it would cost the sockets that its successor needs.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pynvml as nv

from miner.fleet.nvml_calls import (
    NOT_AVAILABLE,
    error_text,
    is_split,
    memory_of,
    optional,
    slices_of,
    text_of,
)
from miner.fleet.nvml_samples import NvmlSampler

_PCI_DEVICES = Path("/sys/bus/pci/devices")


def scan_gpus() -> dict[str, Any]:
    """Every GPU: what it is, what it is linked to, how much of it is used, or what is wrong with it."""
    gpus = []
    for index in range(nv.nvmlDeviceGetCount()):
        try:
            gpus += _gpus_in_slot(index)
        except nv.NVMLError as error:
            gpus.append({"slot": index, "error": error_text(error)})
    return {"gpus": gpus, "driver": text_of(nv.nvmlSystemGetDriverVersion())}


def _gpus_in_slot(index: int) -> list[dict[str, Any]]:
    """The GPU in a slot, or its slices where it is split (MIG)."""
    handle = nv.nvmlDeviceGetHandleByIndex(index)
    capability = list(nv.nvmlDeviceGetCudaComputeCapability(handle))
    bus = text_of(nv.nvmlDeviceGetPciInfo(handle).busId)
    place = {"cores": near_cores(bus)}
    if is_split(handle):
        slices = [_facts(part, index, capability) | place | {"slice": True} for part in slices_of(handle)]
        return slices or [
            {
                "slot": index,
                "error": "MIG is enabled, and it has no slices: nvidia-smi mig -cgi 0 -C makes one",
            }
        ]
    return [_facts(handle, index, capability) | place | {"bus": bus, **_links(handle)}]


def near_cores(bus: str, devices: Path = _PCI_DEVICES) -> str:
    """The cores of the GPU's NUMA node, from the kernel's list, like NVML's; "" if it has none."""
    domain, _, rest = bus.lower().partition(":")
    try:
        # NVML writes the domain with eight digits, the kernel with four.
        return (devices / f"{int(domain, 16):04x}:{rest}" / "local_cpulist").read_text("ascii").strip()
    except (OSError, ValueError):
        return ""


def _facts(handle: Any, slot: int, capability: list[int]) -> dict[str, Any]:
    memory = memory_of(handle)
    return {
        "slot": slot,
        "uuid": text_of(nv.nvmlDeviceGetUUID(handle)),
        "name": text_of(nv.nvmlDeviceGetName(handle)),
        "capability": capability,
        "total": memory.total,
        "used": memory.used,
        "processes": len(optional(nv.nvmlDeviceGetComputeRunningProcesses, handle, default=())),
    }


def _links(handle: Any) -> dict[str, Any]:
    """The bus addresses at the other ends of its NVLinks, and whether one of them is a switch."""
    peers, switch = set(), False
    for link in range(nv.NVML_NVLINK_MAX_LINKS):
        try:
            if nv.nvmlDeviceGetNvLinkState(handle, link) != nv.NVML_FEATURE_ENABLED:
                continue
        except nv.NVMLError as error:
            if error.value in (*NOT_AVAILABLE, nv.NVML_ERROR_INVALID_ARGUMENT):
                break  # no more links than that
            raise
        kind = optional(nv.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link, default=None)
        remote = optional(nv.nvmlDeviceGetNvLinkRemotePciInfo, handle, link, default=None)
        if kind == nv.NVML_NVLINK_DEVICE_TYPE_SWITCH or remote is None:
            switch = True  # boards without switches are old enough to name their other ends
        else:
            peers.add(text_of(remote.busId))
    return {"peers": sorted(peers), "switch": switch}


class NvmlWorker:
    """Answers one request after the other."""

    def __init__(self) -> None:
        self._is_started = False
        self._uuids: list[str] = []
        self._sampler: NvmlSampler | None = None

    def answer(self, request: str) -> dict[str, Any]:
        try:
            if not self._is_started:
                nv.nvmlInit()
                self._is_started = True
            return {"samples": self._sample()} if request == "sample" else self._scan()
        except nv.NVMLError as error:
            self._is_started, self._sampler = False, None
            return {
                "problem": error_text(error),
                "absent": error.value == nv.NVML_ERROR_LIBRARY_NOT_FOUND,
            }

    def _scan(self) -> dict[str, Any]:
        answer = scan_gpus()
        uuids = [gpu.get("uuid", "") for gpu in answer["gpus"]]
        if uuids != self._uuids:  # a GPU came or went, or was split
            self._uuids = uuids
            self._forget_sampler()
        return answer

    def _sample(self) -> list[dict[str, Any]]:
        if self._sampler is None:
            self._sampler = NvmlSampler()
        return self._sampler.sample()

    def _forget_sampler(self) -> None:
        if self._sampler is not None:
            self._sampler.close()
        self._sampler = None


def main() -> None:
    os.nice(10)
    worker = NvmlWorker()
    for line in sys.stdin:
        try:
            sys.stdout.write(json.dumps(worker.answer(line.strip())) + "\n")
            sys.stdout.flush()
        except BrokenPipeError:
            os._exit(0)  # the daemon was killed; a traceback would go into its log of JSON lines


if __name__ == "__main__":
    main()
