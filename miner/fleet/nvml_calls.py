"""Calls of NVML that scans and samples share. For the worker process only."""

from __future__ import annotations

from typing import Any

import pynvml as nv

#: Errors of a call that a GPU, a driver or a virtual machine does not have.
NOT_AVAILABLE = (nv.NVML_ERROR_NOT_SUPPORTED, nv.NVML_ERROR_FUNCTION_NOT_FOUND, nv.NVML_ERROR_NO_PERMISSION)


def optional(call: Any, *arguments: Any, default: Any) -> Any:
    try:
        return call(*arguments)
    except nv.NVMLError as error:
        if error.value in NOT_AVAILABLE:
            return default
        raise


def memory_of(handle: Any) -> Any:
    """The newer call leaves out what the driver keeps for itself; the older one counts it as used."""
    try:
        return nv.nvmlDeviceGetMemoryInfo(handle, version=nv.nvmlMemory_v2)
    except nv.NVMLError as error:
        if error.value not in (*NOT_AVAILABLE, nv.NVML_ERROR_ARGUMENT_VERSION_MISMATCH):
            raise
        return nv.nvmlDeviceGetMemoryInfo(handle)


def is_split(handle: Any) -> bool:
    """Whether it is split into slices (MIG)."""
    return bool(optional(nv.nvmlDeviceGetMigMode, handle, default=(0, 0))[0])


def slices_of(handle: Any) -> list[Any]:
    slices = []
    for number in range(optional(nv.nvmlDeviceGetMaxMigDeviceCount, handle, default=0)):
        try:
            slices.append(nv.nvmlDeviceGetMigDeviceHandleByIndex(handle, number))
        except nv.NVMLError as error:
            if error.value != nv.NVML_ERROR_NOT_FOUND:
                raise
    return slices


def text_of(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def error_text(error: Any) -> str:
    return f"NVML says: {error}"
