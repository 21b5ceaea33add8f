"""Scan and measure GPUs through NVML, by a child process that may hang without harm (`nvml_worker`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pydantic import BaseModel, Field

from core.domain.hardware import from_nvml
from miner.api.samples import GpuSample
from miner.fleet.sources import GpuScan, NoNvidiaDriver, ScanFailed, ScannedGpu
from miner.support.subprocess import python_path

log = logging.getLogger(__name__)

WORKER = (sys.executable, "-P", "-m", "miner.fleet.nvml_worker")
#: Variables for the driver's library and the dynamic linker; no others are passed on.
_PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH")
_PASSED_ON_PREFIXES = ("CUDA_", "NVIDIA_", "NVML_")
#: A scan of 64 GPUs is 20 kB.
_MAX_LINE = 2**20
#: Processes that hang in the driver, where no signal ends them, while another one is tried.
_MAX_DYING = 3


class _NvmlGpu(BaseModel):
    """A GPU, as the worker writes it."""

    slot: int
    error: str | None = None
    uuid: str = ""
    name: str = ""
    capability: tuple[int, int] = (0, 0)
    total: int = Field(default=0, ge=0)
    used: int = Field(default=0, ge=0)
    processes: int = 0
    slice: bool = False
    bus: str = ""
    peers: tuple[str, ...] = ()
    switch: bool = False
    cores: str = ""


class _NvmlSample(BaseModel):
    slot: int
    slice: bool
    sample: GpuSample


class _NvmlAnswer(BaseModel):
    problem: str | None = None
    absent: bool = False


class _ScanAnswer(_NvmlAnswer):
    gpus: tuple[_NvmlGpu, ...] = ()
    driver: str = ""


class _SampleAnswer(_NvmlAnswer):
    samples: tuple[_NvmlSample, ...] = ()


AnswerT = TypeVar("AnswerT", bound=_NvmlAnswer)


@dataclass(frozen=True, slots=True)
class NumberedSample:
    """A GPU's sample, whose `gpu` is the UUID, with its number as in a scan."""

    index: int
    sample: GpuSample


class NvmlSource:
    def __init__(
        self,
        *,
        timeout: float = 10.0,
        start_timeout: float = 60.0,
        sample_timeout: float = 5.0,
        worker: Sequence[str] = WORKER,
    ) -> None:
        """The first scan takes seconds for each GPU where the driver keeps no state between its users."""
        self._timeout, self._start_timeout, self._sample_timeout = timeout, start_timeout, sample_timeout
        self._worker = worker
        self._process: asyncio.subprocess.Process | None = None
        self._dying: set[asyncio.Task[int]] = set()
        #: The process answers one request after the other.
        self._lock = asyncio.Lock()

    async def scan(self) -> GpuScan:
        async with self._lock:
            answer = await self._ask("scan", _ScanAnswer, self._timeout)
            if any(gpu.error for gpu in answer.gpus):
                # The library keeps what it knew of a GPU when opened: only a new process sees a reset one.
                self._drop()
        return _scan_of(answer)

    async def sample(self) -> list[NumberedSample]:
        """Measure every GPU that answers. `ScanFailed`: nothing was measured."""
        async with self._lock:
            if self._dying:
                await asyncio.wait(self._dying, timeout=1.0)
            if self._process is None and self._dying:
                raise ScanFailed("nothing is measured while a process hangs in the driver: scans come first")
            answer = await self._ask("sample", _SampleAnswer, self._sample_timeout)
        return _samples_of(answer)

    async def close(self) -> None:
        self._drop()
        if self._dying:
            await asyncio.wait(self._dying, timeout=1.0)

    async def _ask(self, request: str, kind: type[AnswerT], limit: float) -> AnswerT:
        if self._process is None:
            limit = self._start_timeout
        try:
            # Not `wait_for`: in Python 3.11 it loses a cancellation that comes with the answer, and the
            # daemon would wait for ever for a task that goes on.
            async with asyncio.timeout(limit):
                answer = await self._query(request, kind)
        except TimeoutError:
            self._drop()
            raise ScanFailed(f"NVML did not answer within {limit:g} s: the driver hangs; see dmesg") from None
        except BaseException:
            self._drop()
            raise
        if answer.problem is not None:
            self._drop()
            raise (NoNvidiaDriver if answer.absent else ScanFailed)(answer.problem)
        return answer

    async def _query(self, request: str, kind: type[AnswerT]) -> AnswerT:
        try:
            process = await self._running()
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{request}\n".encode())
            await process.stdin.drain()
            line = await process.stdout.readline()
            if not line:
                raise ScanFailed(f"the NVML process ended with status {await process.wait()}")
            return kind.model_validate_json(line)
        except (OSError, ValueError) as error:
            raise ScanFailed(f"the NVML process cannot be used: {error}") from error

    async def _running(self) -> asyncio.subprocess.Process:
        if len(self._dying) >= _MAX_DYING:
            raise ScanFailed(
                "NVML does not answer, and its processes cannot be ended: the driver hangs; see dmesg"
            )
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(
                *self._worker,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                env=_environment(os.environ),
                limit=_MAX_LINE,
            )
        return self._process

    def _drop(self) -> None:
        """End the process without waiting: one that hangs in the driver ends when the driver lets it."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        task = asyncio.ensure_future(process.wait())
        self._dying.add(task)
        task.add_done_callback(self._dying.discard)


def _environment(outer: Mapping[str, str]) -> dict[str, str]:
    passed_on = {
        name: value
        for name, value in outer.items()
        if name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES)
    }
    return {**passed_on, "PYTHONPATH": python_path()}


def _scan_of(answer: _ScanAnswer) -> GpuScan:
    good = [gpu for gpu in answer.gpus if gpu.error is None]
    by_bus = {gpu.bus: gpu.uuid for gpu in good if gpu.bus}
    on_switch = {gpu.uuid for gpu in good if gpu.switch}
    # A GPU that is split (MIG) has one slot and several entries: then the slots do not number them.
    renumbered = any(gpu.slice for gpu in good)
    gpus = []
    for position, gpu in enumerate(good):
        linked = {by_bus[bus] for bus in gpu.peers if bus in by_bus}
        linked |= on_switch if gpu.switch else set()
        gpus.append(_scanned_gpu(gpu, position if renumbered else gpu.slot, frozenset(linked - {gpu.uuid})))
    errors = {gpu.slot: gpu.error for gpu in answer.gpus if gpu.error is not None}
    return GpuScan(tuple(gpus), errors, f"driver {answer.driver}")


def _scanned_gpu(gpu: _NvmlGpu, index: int, linked: frozenset[str]) -> ScannedGpu:
    kind = from_nvml(gpu.name, gpu.total, gpu.capability, nvlink=bool(linked))
    return ScannedGpu(gpu.uuid, index, kind, linked, gpu.total, gpu.used, gpu.processes, cores=gpu.cores)


def _samples_of(answer: _SampleAnswer) -> list[NumberedSample]:
    renumbered = any(gpu.slice for gpu in answer.samples)  # as in `_scan_of`
    return [
        NumberedSample(position if renumbered else gpu.slot, gpu.sample)
        for position, gpu in enumerate(answer.samples)
    ]
