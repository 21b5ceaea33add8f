"""Scan the GPUs through NVML, in a process that exists for nothing else.

`miner.fleet.nvml` starts it; every line on its input requests a scan, every line on its output is one. A
faulty driver can hang any call for ever, where no signal ends it: here that costs a process, in the
daemon it would cost the sockets that its successor needs.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pynvml as nv

#: Errors of a call that a GPU, a driver or a virtual machine does not have.
_NOT_AVAILABLE = (nv.NVML_ERROR_NOT_SUPPORTED, nv.NVML_ERROR_FUNCTION_NOT_FOUND, nv.NVML_ERROR_NO_PERMISSION)


def scan_gpus() -> dict[str, Any]:
    """Every GPU: what it is, what it is linked to, how much of it is used, or what is wrong with it."""
    gpus = []
    for index in range(nv.nvmlDeviceGetCount()):
        try:
            gpus += _gpus_in_slot(index)
        except nv.NVMLError as error:
            gpus.append({"slot": index, "error": _error_text(error)})
    return {"gpus": gpus, "driver": _text(nv.nvmlSystemGetDriverVersion())}


def _gpus_in_slot(index: int) -> list[dict[str, Any]]:
    """The GPU in a slot, or its slices where it is split (MIG)."""
    handle = nv.nvmlDeviceGetHandleByIndex(index)
    capability = list(nv.nvmlDeviceGetCudaComputeCapability(handle))
    if _optional(nv.nvmlDeviceGetMigMode, handle, default=(0, 0))[0]:
        slices = [_facts(part, index, capability) | {"slice": True} for part in _slices(handle)]
        return slices or [
            {
                "slot": index,
                "error": "MIG is enabled, and it has no slices: nvidia-smi mig -cgi 0 -C makes one",
            }
        ]
    bus = _text(nv.nvmlDeviceGetPciInfo(handle).busId)
    return [_facts(handle, index, capability) | {"bus": bus, **_links(handle)}]


def _facts(handle: Any, slot: int, capability: list[int]) -> dict[str, Any]:
    memory = _memory(handle)
    return {
        "slot": slot,
        "uuid": _text(nv.nvmlDeviceGetUUID(handle)),
        "name": _text(nv.nvmlDeviceGetName(handle)),
        "capability": capability,
        "total": memory.total,
        "used": memory.used,
        "processes": len(_optional(nv.nvmlDeviceGetComputeRunningProcesses, handle, default=())),
    }


def _memory(handle: Any) -> Any:
    """The newer call leaves out what the driver keeps for itself; the older one counts it as used."""
    try:
        return nv.nvmlDeviceGetMemoryInfo(handle, version=nv.nvmlMemory_v2)
    except nv.NVMLError as error:
        if error.value not in (*_NOT_AVAILABLE, nv.NVML_ERROR_ARGUMENT_VERSION_MISMATCH):
            raise
        return nv.nvmlDeviceGetMemoryInfo(handle)


def _slices(handle: Any) -> list[Any]:
    slices = []
    for number in range(_optional(nv.nvmlDeviceGetMaxMigDeviceCount, handle, default=0)):
        try:
            slices.append(nv.nvmlDeviceGetMigDeviceHandleByIndex(handle, number))
        except nv.NVMLError as error:
            if error.value != nv.NVML_ERROR_NOT_FOUND:
                raise
    return slices


def _links(handle: Any) -> dict[str, Any]:
    """The bus addresses at the other ends of its NVLinks, and whether one of them is a switch."""
    peers, switch = set(), False
    for link in range(nv.NVML_NVLINK_MAX_LINKS):
        try:
            if nv.nvmlDeviceGetNvLinkState(handle, link) != nv.NVML_FEATURE_ENABLED:
                continue
        except nv.NVMLError as error:
            if error.value in (*_NOT_AVAILABLE, nv.NVML_ERROR_INVALID_ARGUMENT):
                break  # no more links than that
            raise
        kind = _optional(nv.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link, default=None)
        remote = _optional(nv.nvmlDeviceGetNvLinkRemotePciInfo, handle, link, default=None)
        if kind == nv.NVML_NVLINK_DEVICE_TYPE_SWITCH or remote is None:
            switch = True  # boards without switches are old enough to name their other ends
        else:
            peers.add(_text(remote.busId))
    return {"peers": sorted(peers), "switch": switch}


def _optional(call: Any, *arguments: Any, default: Any) -> Any:
    try:
        return call(*arguments)
    except nv.NVMLError as error:
        if error.value in _NOT_AVAILABLE:
            return default
        raise


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _error_text(error: Any) -> str:
    return f"NVML says: {error}"


def _answer(started: bool) -> dict[str, Any]:
    try:
        if not started:
            nv.nvmlInit()
        return scan_gpus()
    except nv.NVMLError as error:
        return {"problem": _error_text(error), "absent": error.value == nv.NVML_ERROR_LIBRARY_NOT_FOUND}


def main() -> None:
    os.nice(10)
    started = False
    for _ in sys.stdin:
        answer = _answer(started)
        started = "problem" not in answer
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
