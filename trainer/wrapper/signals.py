"""Asking the wrapper to stop: SIGTERM or SIGINT, or the stop file. All of them end up as the file, which the
training polls: launchers answer signals by dropping everything."""

from __future__ import annotations

import contextlib
import faulthandler
import signal
import sys
from pathlib import Path
from types import FrameType

from trainer.wrapper.processes import dump_stacks


class StopRequest:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._signalled = False

    def listen(self) -> None:
        """From here on signals are requests. As process 1 nothing would happen by default."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        signal.signal(signal.SIGUSR1, _on_dump)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True
        # Where the file cannot be written the training hears of it by the wrapper's patience running out.
        with contextlib.suppress(OSError):
            self._path.touch()

    @property
    def asked(self) -> bool:
        return self._signalled or self._path.exists()


def _on_dump(number: int, frame: FrameType | None) -> None:
    faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
    dump_stacks()
