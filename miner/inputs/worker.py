"""A process that carries out one order: fetch a dataset or a model, or measure lengths.

`miner.inputs.fetch` starts it. It exits when its standard input closes: then the daemon is gone.
"""

from __future__ import annotations

import sys
import traceback

from core.domain.job_states import EndReason, StepFailed
from miner.inputs.messages import (
    PROTOCOL,
    DatasetOrder,
    FetchEvent,
    FetchFailed,
    FetchNote,
    FetchOrder,
    FetchProgress,
    LengthsMeasured,
    ModelOrder,
)
from miner.inputs.part_files import is_full
from miner.support.child_main import EventWriter, serve

#: Behind whatever answers validators.
NICENESS = 10
#: Whatever a hostile file makes of a parser, the host's memory stays.
MAX_MEMORY = 8 * 1024**3


def carry_out(order: FetchOrder, write: EventWriter) -> FetchEvent:
    def on_progress(what: str, done: int, total: int | None) -> None:
        if write.is_due(what, done, total):
            write(FetchProgress(what=what, done=done, total=total))

    def on_note(text: str) -> None:
        write(FetchNote(text=text[:2000]))

    # Each brings libraries of its own.
    if isinstance(order, DatasetOrder):
        from miner.inputs.dataset_fetch import fetch_dataset

        return fetch_dataset(order, on_progress, on_note)
    if isinstance(order, ModelOrder):
        from miner.inputs.model_fetch import fetch_model

        return fetch_model(order, lambda done, total: on_progress("model", done, total), on_note)
    from miner.inputs.dataset_fetch import measure_lengths

    return LengthsMeasured(facts=measure_lengths(order))


def failure_event(error: Exception, _order: FetchOrder) -> FetchFailed:
    if isinstance(error, StepFailed):
        return FetchFailed(reason=error.reason, text=str(error), retry_after=error.retry_after)
    if isinstance(error, MemoryError):
        text = f"over {MAX_MEMORY / 1e9:.0f} GB of memory are not enough"
        return FetchFailed(reason=EndReason.BAD_DATA, text=text)
    traceback.print_exc()
    reason = EndReason.DISK_FULL if is_full(error) else EndReason.BUG
    return FetchFailed(reason=reason, text=f"{type(error).__name__}: {error}"[:1000])


if __name__ == "__main__":
    sys.exit(serve(PROTOCOL, carry_out, failure_event, niceness=NICENESS, max_memory=MAX_MEMORY))
