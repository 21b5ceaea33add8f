"""Ask NVML about the GPUs, in a process that exists for nothing else.

`miner.fleet.nvml` starts it; every line on its input is "scan" or "sample", every line on its output an
answer. A faulty driver can hang any call for ever, where no signal ends it: here that costs a process, in the
daemon it would cost the sockets that its successor needs.

What a GPU, a driver or a library does not report is None in a sample, and is not asked for again.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict

import pynvml as nv

_PCI_DEVICES = Path("/sys/bus/pci/devices")
#: Errors of a call that a GPU, a driver or a virtual machine does not have.
NOT_AVAILABLE = (nv.NVML_ERROR_NOT_SUPPORTED, nv.NVML_ERROR_FUNCTION_NOT_FOUND, nv.NVML_ERROR_NO_PERMISSION)
#: Answers that will not change: the call is left out from then on.
_NEVER = (*NOT_AVAILABLE, nv.NVML_ERROR_INVALID_ARGUMENT, nv.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
#: The GPU itself is gone: nothing else is asked of it this time.
_GONE = (nv.NVML_ERROR_GPU_IS_LOST, nv.NVML_ERROR_UNINITIALIZED)

#: Meaning of each bit of the reasons that hold the clocks down. Idle, and clocks set by hand, do not count.
_THROTTLE = {
    nv.nvmlClocksThrottleReasonSwThermalSlowdown: "heat",
    nv.nvmlClocksThrottleReasonHwThermalSlowdown: "heat",
    nv.nvmlClocksThrottleReasonSwPowerCap: "power",
    nv.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: "power",
    nv.nvmlClocksThrottleReasonHwSlowdown: "hardware",
}
_ALL_LINKS = 0xFFFFFFFF
#: Counters since the driver was loaded, by what is computed from them, with their unit in bytes.
_COUNTERS = {
    "pcie": ((nv.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, nv.NVML_FI_DEV_PCIE_COUNT_RX_BYTES), 1),
    "nvlink": (
        (
            (nv.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _ALL_LINKS),
            (nv.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, _ALL_LINKS),
        ),
        1024,
    ),
}
_MIB = float(1 << 20)


# What scans and samples share


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
    """Return True if the GPU is split into slices (MIG)."""
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


# Scans


class NvmlScan(TypedDict):
    """A scan of the host: an entry for each GPU or slice, and the version of the driver."""

    gpus: list[dict[str, object]]
    driver: str


def scan_gpus() -> NvmlScan:
    """Every GPU: what it is, what it is linked to, how much of it is used, or what is wrong with it."""
    gpus: list[dict[str, object]] = []
    for index in range(nv.nvmlDeviceGetCount()):
        try:
            gpus += _scanned_in_slot(index)
        except nv.NVMLError as error:
            gpus.append({"slot": index, "error": error_text(error)})
    return {"gpus": gpus, "driver": text_of(nv.nvmlSystemGetDriverVersion())}


def _scanned_in_slot(index: int) -> list[dict[str, object]]:
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


def _facts(handle: Any, slot: int, capability: list[int]) -> dict[str, object]:
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


def _links(handle: Any) -> dict[str, object]:
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


# Samples


class NvmlSampler:
    """All GPUs and slices of this host, each with what was found out about it once."""

    def __init__(self) -> None:
        self._gpus: list[_MeasuredGpu] = []
        for slot in range(nv.nvmlDeviceGetCount()):
            try:
                self._gpus += _measured_in_slot(slot)
            except nv.NVMLError:
                continue  # a scan says what is wrong with it
        self._xids = _XidEvents([gpu.whole for gpu in self._gpus])

    def sample(self) -> list[dict[str, object]]:
        """Return an entry for each GPU that answers, with the fields of `GpuSample`."""
        xids = self._xids.since_last()
        answers = []
        for gpu in self._gpus:
            try:
                values = gpu.values()
            except nv.NVMLError:
                values = {}
            found = xids.get(_address(gpu.whole), [])
            if not found and all(
                value is None for name, value in values.items() if name != "max_sm_clock_mhz"
            ):
                continue
            sample = {"at": time.time(), "gpu": gpu.uuid, "xids": found, **values}
            answers.append({"slot": gpu.slot, "slice": gpu.is_slice, "sample": sample})
        return answers

    def close(self) -> None:
        for gpu in self._gpus:
            gpu.close()
        self._xids.close()


def _measured_in_slot(slot: int) -> list[_MeasuredGpu]:
    handle = nv.nvmlDeviceGetHandleByIndex(slot)
    if not is_split(handle):
        return [_MeasuredGpu(handle, handle, slot)]
    return [_MeasuredGpu(part, handle, slot) for part in slices_of(handle)]


class _MeasuredGpu:
    """One GPU, or one slice of it: of a slice memory and activity are its own, heat and clocks the GPU's."""

    def __init__(self, handle: Any, whole: Any, slot: int) -> None:
        self.handle, self.whole, self.slot = handle, whole, slot
        self.is_slice = handle is not whole
        self.uuid = text_of(nv.nvmlDeviceGetUUID(handle))
        self._left_out: set[str] = set()
        self._counted: dict[str, tuple[int, int]] = {}
        self._max_clock = self._ask("max clock", nv.nvmlDeviceGetMaxClockInfo, whole, nv.NVML_CLOCK_SM)
        self._gpm = _Gpm.of(handle, whole)

    def values(self) -> dict[str, object]:
        memory = self._ask("memory", memory_of, self.handle)
        measured = self._gpm.read() if self._gpm is not None else {}
        return {
            "utilization": self._utilization(measured),
            "memory_used": memory and memory.used,
            "memory_total": memory and memory.total,
            "temperature": self._ask("temperature", _temperature, self.whole),
            "sm_clock_mhz": self._ask("clock", nv.nvmlDeviceGetClockInfo, self.whole, nv.NVML_CLOCK_SM),
            "max_sm_clock_mhz": self._max_clock,
            "throttle": self._throttle(),
            "ecc_errors": self._ask(
                "ecc",
                nv.nvmlDeviceGetTotalEccErrors,
                self.whole,
                nv.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
                nv.NVML_VOLATILE_ECC,
            ),
            "tensor": _share(measured.get("tensor")),
            "dram": _share(measured.get("dram")),
            **self._power(),
            **self._traffic(measured),
        }

    def close(self) -> None:
        if self._gpm is not None:
            self._gpm.close()

    def _ask(self, name: str, call: Any, *arguments: Any) -> Any:
        if name in self._left_out:
            return None
        try:
            return call(*arguments)
        except nv.NVMLError as error:
            if error.value in _GONE:
                raise
            if error.value in _NEVER:
                self._left_out.add(name)
            return None

    def _utilization(self, measured: dict[str, float]) -> float | None:
        if self.is_slice:  # the usual call knows whole GPUs only
            return _share(measured.get("busy"))
        rates = self._ask("utilization", nv.nvmlDeviceGetUtilizationRates, self.handle)
        return None if rates is None else _share(rates.gpu)

    def _throttle(self) -> list[str] | None:
        reasons = self._ask("throttle", _clock_reasons, self.whole)
        if reasons is None:
            return None
        return sorted({meaning for bit, meaning in _THROTTLE.items() if reasons & bit})

    def _power(self) -> dict[str, float | None]:
        """The power of a whole GPU: a slice's share of it is not known."""
        if self.is_slice:
            return {"power_watts": None, "power_limit_watts": None}
        power = self._ask("power", nv.nvmlDeviceGetPowerUsage, self.handle)
        limit = self._ask("power limit", nv.nvmlDeviceGetEnforcedPowerLimit, self.handle)
        return {
            "power_watts": None if power is None else power / 1000,
            "power_limit_watts": None if limit is None else limit / 1000,
        }

    def _traffic(self, measured: dict[str, float]) -> dict[str, float | None]:
        """Bytes per second in both directions: by GPM, else by counters, else by a look of 20 ms at PCIe."""
        pcie, nvlink = measured.get("pcie"), measured.get("nvlink")
        if pcie is None and not self.is_slice:
            pcie = self._counter_rate("pcie")
            if "pcie" in self._left_out:
                pcie = self._pcie_now()
        if nvlink is None and not self.is_slice:
            nvlink = self._counter_rate("nvlink")
        return {"pcie_bytes_s": pcie, "nvlink_bytes_s": nvlink}

    def _counter_rate(self, name: str) -> float | None:
        """The rate since the last sample; None at the first one."""
        fields, unit = _COUNTERS[name]
        values = self._ask(name, nv.nvmlDeviceGetFieldValues, self.handle, list(fields))
        if values is None:
            return None
        if any(value.nvmlReturn != nv.NVML_SUCCESS for value in values):
            if any(value.nvmlReturn in _NEVER for value in values):
                self._left_out.add(name)
            return None
        total, at = sum(_integer(value) for value in values) * unit, values[0].timestamp
        before = self._counted.get(name)
        self._counted[name] = total, at
        if before is None or total < before[0] or at <= before[1]:
            return None
        return float((total - before[0]) / (at - before[1]) * 1e6)

    def _pcie_now(self) -> float | None:
        rates = [
            self._ask("pcie now", nv.nvmlDeviceGetPcieThroughput, self.handle, counter)
            for counter in (nv.NVML_PCIE_UTIL_TX_BYTES, nv.NVML_PCIE_UTIL_RX_BYTES)
        ]
        return None if None in rates else float(sum(rates) * 1024)


class _Gpm:
    """GPU performance monitoring: activity between two samples. Hopper and newer."""

    def __init__(self, handle: Any, whole: Any) -> None:
        self._handle, self._whole = handle, whole
        self._instance = nv.nvmlDeviceGetGpuInstanceId(handle) if handle is not whole else None
        self._last, self._next = nv.nvmlGpmSampleAlloc(), nv.nvmlGpmSampleAlloc()
        self._has_last = False
        self._wanted = nv.c_nvmlGpmMetricsGet_t()
        self._wanted.version = nv.NVML_GPM_METRICS_GET_VERSION
        self._wanted.numMetrics = len(_GPM_METRICS)
        for place, (number, _, _) in enumerate(_GPM_METRICS):
            self._wanted.metrics[place].metricId = number

    @classmethod
    def of(cls, handle: Any, whole: Any) -> _Gpm | None:
        try:
            if nv.nvmlGpmQueryDeviceSupport(whole).isSupportedDevice:
                return cls(handle, whole)
        except nv.NVMLError:
            pass  # an older GPU, driver or library
        return None

    def read(self) -> dict[str, float]:
        """Return the activity since the last call; nothing at the first."""
        try:
            if self._instance is None:
                nv.nvmlGpmSampleGet(self._handle, self._next)
            else:
                nv.nvmlGpmMigSampleGet(self._whole, self._instance, self._next)
            self._last, self._next = self._next, self._last
            had_last, self._has_last = self._has_last, True
            if not had_last:
                return {}
            self._wanted.sample1, self._wanted.sample2 = self._next, self._last
            metrics = nv.nvmlGpmMetricsGet(self._wanted).metrics
        except nv.NVMLError as error:
            self._has_last = False
            if error.value in _GONE:
                raise
            return {}
        found: dict[str, float] = {}
        missing = set()
        for place, (_, name, unit) in enumerate(_GPM_METRICS):
            value = metrics[place].value
            if metrics[place].nvmlReturn == nv.NVML_SUCCESS and math.isfinite(value):
                found[name] = found.get(name, 0.0) + value * unit
            else:
                missing.add(name)
        return {name: value for name, value in found.items() if name not in missing}

    def close(self) -> None:
        for sample in (self._last, self._next):
            nv.nvmlGpmSampleFree(sample)


#: A sum of two metrics needs both of them.
_GPM_METRICS = (
    (nv.NVML_GPM_METRIC_GRAPHICS_UTIL, "busy", 1.0),
    (nv.NVML_GPM_METRIC_ANY_TENSOR_UTIL, "tensor", 1.0),
    (nv.NVML_GPM_METRIC_DRAM_BW_UTIL, "dram", 1.0),
    (nv.NVML_GPM_METRIC_PCIE_TX_PER_SEC, "pcie", _MIB),
    (nv.NVML_GPM_METRIC_PCIE_RX_PER_SEC, "pcie", _MIB),
    (nv.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC, "nvlink", _MIB),
    (nv.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC, "nvlink", _MIB),
)


class _XidEvents:
    """The driver's errors about GPUs. They are looked for, never waited for."""

    def __init__(self, handles: list[Any]) -> None:
        self._set: Any = None
        try:
            self._set = nv.nvmlEventSetCreate()
        except nv.NVMLError:
            return
        for handle in {_address(handle): handle for handle in handles}.values():
            try:
                nv.nvmlDeviceRegisterEvents(handle, nv.nvmlEventTypeXidCriticalError, self._set)
            except nv.NVMLError:
                continue

    def since_last(self) -> dict[int, list[int]]:
        """GPU's address → its errors since the last call."""
        found: dict[int, list[int]] = {}
        while self._set is not None:
            try:
                event = nv.nvmlEventSetWait_v2(self._set, 0)
            except nv.NVMLError as error:
                if error.value != nv.NVML_ERROR_TIMEOUT:
                    self.close()
                break
            if event.eventType == nv.nvmlEventTypeXidCriticalError:
                found.setdefault(_address(event.device), []).append(int(event.eventData))
        return found

    def close(self) -> None:
        event_set, self._set = self._set, None
        if event_set is not None:
            try:
                nv.nvmlEventSetFree(event_set)
            except nv.NVMLError:
                return


def _temperature(handle: Any) -> int:
    return _first_there(
        (nv.nvmlDeviceGetTemperature, nv.nvmlDeviceGetTemperatureV), handle, nv.NVML_TEMPERATURE_GPU
    )


def _clock_reasons(handle: Any) -> int:
    calls = (nv.nvmlDeviceGetCurrentClocksThrottleReasons, nv.nvmlDeviceGetCurrentClocksEventReasons)
    return _first_there(calls, handle)


def _first_there(calls: tuple[Any, Any], *arguments: Any) -> int:
    """The older call; the newer one where the library has dropped it."""
    older, newer = calls
    try:
        return int(older(*arguments))
    except nv.NVMLError as error:
        if error.value != nv.NVML_ERROR_FUNCTION_NOT_FOUND:
            raise
        return int(newer(*arguments))


def _address(handle: Any) -> int:
    return ctypes.addressof(handle.contents)


def _share(percent: float | None) -> float | None:
    return None if percent is None else min(max(percent / 100, 0.0), 1.0)


def _integer(value: Any) -> int:
    kind = value.valueType
    is_short = kind in (nv.NVML_VALUE_TYPE_UNSIGNED_INT, nv.NVML_VALUE_TYPE_SIGNED_INT)
    return int(value.value.uiVal if is_short else value.value.ullVal)


# The process


class NvmlWorker:
    """Answers one request after the other."""

    def __init__(self) -> None:
        self._is_started = False
        self._uuids: list[str] = []
        self._sampler: NvmlSampler | None = None

    def answer(self, request: str) -> Mapping[str, object]:
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

    def _scan(self) -> NvmlScan:
        answer = scan_gpus()
        uuids = [str(gpu.get("uuid", "")) for gpu in answer["gpus"]]
        if uuids != self._uuids:  # a GPU came or went, or was split
            self._uuids = uuids
            self._forget_sampler()
        return answer

    def _sample(self) -> list[dict[str, object]]:
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
