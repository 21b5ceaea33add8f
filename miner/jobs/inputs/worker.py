"""One piece of fetching or looking, by a process that exists for nothing else.

`miner.jobs.inputs.child` starts it. It ends when its input does: then nobody waits for it any more.
"""

from __future__ import annotations

import os
import resource
import sys
import threading
import time
import traceback

from miner.jobs.inputs import words
from miner.jobs.inputs.parts import is_full
from miner.jobs.inputs.words import DatasetOrder, Event, Failed, ModelOrder, Order
from miner.jobs.ports import StepFailed
from miner.jobs.states import EndReason

#: Behind whatever answers validators.
NICENESS = 10
#: Whatever a hostile file makes of a parser, the host's memory stays.
MAX_MEMORY = 8 * 1024**3
TELL_SECONDS = 0.25


class Teller:
    """Writes events to where the daemon listens; whatever else prints goes to standard error."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)
        self._lock = threading.Lock()
        #: What → when it was told last, and how much.
        self._told: dict[str, tuple[float, int]] = {}

    def __call__(self, event: Event) -> None:
        with self._lock:
            self._out.write(words.line_of(event))

    def note(self, text: str) -> None:
        self(words.Note(text=text[:2000]))

    def progress(self, what: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        last, before = self._told.get(what, (0.0, -1))
        if now - last >= TELL_SECONDS or (done == total != before):
            self._told[what] = now, done
            self(words.Progress(what=what, done=done, total=total))


def carried_out(order: Order, tell: Teller) -> Event:
    # Each brings libraries of its own.
    if isinstance(order, DatasetOrder):
        from miner.jobs.inputs.dataset_fetch import fetch_dataset

        return fetch_dataset(order, tell.progress, tell.note)
    if isinstance(order, ModelOrder):
        from miner.jobs.inputs.model_fetch import fetch_model

        return fetch_model(order, lambda did, of: tell.progress("model", did, of), tell.note)
    from miner.jobs.inputs.measure import measure

    return words.Measured(facts=measure(order))


def main() -> int:
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tell = Teller()
    # Not through sys.stdin: a thread that waits there would keep the interpreter from ending.
    with open(0, "rb", buffering=0, closefd=False) as given:
        order = words.order_in(given.readline())
    threading.Thread(target=_end_with_the_daemon, name="lifeline", daemon=True).start()
    try:
        tell(carried_out(order, tell))
    except StepFailed as failure:
        tell(Failed(reason=failure.reason, text=str(failure), retry_after=failure.retry_after))
    except MemoryError:
        tell(
            Failed(reason=EndReason.BAD_DATA, text=f"over {MAX_MEMORY / 1e9:.0f} GB of memory are not enough")
        )
    except Exception as error:  # noqa: BLE001 - the outermost: everything becomes an answer
        traceback.print_exc()
        reason = EndReason.DISK_FULL if is_full(error) else EndReason.BUG
        tell(Failed(reason=reason, text=f"{type(error).__name__}: {error}"[:1000]))
    return 0


def _end_with_the_daemon() -> None:
    while os.read(0, 4096):
        pass
    os._exit(3)


if __name__ == "__main__":
    sys.exit(main())
