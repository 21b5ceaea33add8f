"""Measurements of GPUs and of the host, and the last hour of them."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TypeVar

from miner.api.samples import GpuSample, HostSample

#: How much is kept in memory; older measurements are in the store, rolled up.
KEPT_SECONDS = 3600.0
#: A GPU whose newest sample is older than this is not measured now.
FRESH_SECONDS = 30.0

SampleT = TypeVar("SampleT", GpuSample, HostSample)


class SampleHistory:
    """The last hour of measurements, by GPU. For one event loop."""

    def __init__(self, kept_seconds: float = KEPT_SECONDS) -> None:
        self._kept = kept_seconds
        self._gpus: dict[str, deque[GpuSample]] = {}
        self._host: deque[HostSample] = deque()

    def add(self, samples: Iterable[GpuSample], host: HostSample | None = None) -> None:
        for sample in samples:
            self._append(self._gpus.setdefault(sample.gpu, deque()), sample)
        if host is not None:
            self._append(self._host, host)
            self._forget_gone(host.at - self._kept)

    @property
    def gpus(self) -> list[str]:
        return list(self._gpus)

    def latest(self, gpu: str, since: float = 0.0) -> GpuSample | None:
        """The newest sample. `since`: an older one does not count, because the GPU may have vanished."""
        kept = self._gpus.get(gpu)
        return kept[-1] if kept and kept[-1].at >= since else None

    def since(self, gpu: str, moment: float) -> list[GpuSample]:
        return _newer(self._gpus.get(gpu, ()), moment)

    @property
    def host(self) -> HostSample | None:
        return self._host[-1] if self._host else None

    def host_since(self, moment: float) -> list[HostSample]:
        return _newer(self._host, moment)

    def _append(self, kept: deque[SampleT], sample: SampleT) -> None:
        while kept and kept[-1].at > sample.at:  # the clock was put back: they would never become old
            kept.pop()
        kept.append(sample)
        while kept[0].at < sample.at - self._kept:
            kept.popleft()

    def _forget_gone(self, before: float) -> None:
        for gpu in [gpu for gpu, kept in self._gpus.items() if kept[-1].at < before]:
            del self._gpus[gpu]


def _newer(kept: Sequence[SampleT], moment: float) -> list[SampleT]:
    newest_first = itertools.takewhile(lambda sample: sample.at >= moment, reversed(kept))
    return list(newest_first)[::-1]
