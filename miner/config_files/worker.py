"""A process that answers one question about what a change would do: see `what_if`."""

from __future__ import annotations

import sys
import traceback
from typing import assert_never

from core.domain.errors import ConfigError
from miner.config_files.what_if import (
    PROTOCOL,
    BacktestDone,
    BacktestOrder,
    CheckDone,
    CheckOrder,
    WhatIfError,
    WhatIfEvent,
    WhatIfOrder,
    WhatIfRefused,
)
from miner.support.child_main import EventWriter, serve

#: Below everything that trains or answers.
NICENESS = 15
MAX_MEMORY = 2 << 30


def carry_out(order: WhatIfOrder, _: EventWriter) -> BacktestDone | CheckDone:
    if isinstance(order, BacktestOrder):
        from miner.config_files.checks import backtest_changes

        return BacktestDone(answer=backtest_changes(order))
    if isinstance(order, CheckOrder):
        from miner.config_files.checks import check_text

        return CheckDone(answer=check_text(order))
    assert_never(order)


def failure_event(error: Exception, _: WhatIfOrder) -> WhatIfEvent:
    if isinstance(error, ConfigError):
        return WhatIfRefused(text=str(error), problems=tuple(vars(one) for one in error.problems))
    traceback.print_exc()
    return WhatIfError(text=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(serve(PROTOCOL, carry_out, failure_event, niceness=NICENESS, max_memory=MAX_MEMORY))
