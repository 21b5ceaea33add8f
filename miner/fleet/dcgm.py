"""Tensor-core and memory activity by DCGM's command, for GPUs for which NVML does not have it.

`dcgmi dmon` prints a table for as long as it runs, a line for each GPU and interval:

    #Entity   NVIDX   TENSO    DRAMA
    ID
    GPU 0     0       0.412    0.173
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import subprocess
import time

#: DCGM_FI_DEV_NVML_INDEX, DCGM_FI_PROF_PIPE_TENSOR_ACTIVE, DCGM_FI_PROF_DRAM_ACTIVE.
_FIELDS = "52,1004,1005"
INTERVAL_SECONDS = 5
#: Older values are left out: the host engine may be gone.
_FRESH_SECONDS = 3 * INTERVAL_SECONDS
#: A command that ended has no host engine, or may not profile.
_RETRY_SECONDS = 600.0
_LINE = re.compile(rb"^GPU +\d+ +(\d+) +(\S+) +(\S+) *$")

Activity = tuple[float | None, float | None]


class DcgmStream:
    """The command, and the last values that it printed. Nothing here waits for it."""

    def __init__(self, program: str) -> None:
        self._command = (program, "dmon", "-e", _FIELDS, "-d", str(INTERVAL_SECONDS * 1000))
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = float("-inf")
        self._rest = b""
        self._values: dict[int, tuple[float, Activity]] = {}

    @classmethod
    def where_installed(cls) -> DcgmStream | None:
        program = shutil.which("dcgmi")
        return cls(program) if program else None

    def latest(self) -> dict[int, Activity]:
        """GPU's index → shares of tensor-core and memory activity."""
        now = time.monotonic()
        has_ended = self._process is not None and self._process.poll() is not None
        for line in self._new_lines():
            found = _LINE.match(line)
            if found:
                self._values[int(found[1])] = now, (_share(found[2]), _share(found[3]))
        if has_ended:
            self.close()
        self._ensure_started(now)
        return {
            index: activity for index, (at, activity) in self._values.items() if now - at <= _FRESH_SECONDS
        }

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1.0)
            assert process.stdout is not None
            process.stdout.close()

    def _ensure_started(self, now: float) -> None:
        if self._process is not None or now - self._started_at < _RETRY_SECONDS:
            return
        self._started_at, self._rest = now, b""
        try:
            # If this process is killed, the command ends at its next line, which nobody reads.
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError:
            return
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)

    def _new_lines(self) -> list[bytes]:
        if self._process is None:
            return []
        assert self._process.stdout is not None
        try:
            self._rest += os.read(self._process.stdout.fileno(), 1 << 16)
        except BlockingIOError:
            return []
        *lines, self._rest = self._rest.split(b"\n")
        return lines


def _share(text: bytes) -> float | None:
    try:
        share = float(text)
    except ValueError:  # "N/A"
        return None
    return min(max(share, 0.0), 1.0) if math.isfinite(share) else None
