"""How often and after what pause something outside is asked again."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from miner.jobs.ports import StepFailed
from miner.jobs.states import EndReason

#: Worth another try within the same step. Stores and hubs sometimes say that something is not there that is.
AGAIN = (EndReason.NETWORK, EndReason.RATE_LIMITED, EndReason.DATA_GONE, EndReason.MODEL_MISSING)
#: Bytes. With less at a time a file would come for ever.
PROGRESS = 64 * 1024
#: A longer pause is left to the job, which lets go of what it holds meanwhile.
LONGEST_WAIT = 60.0


@dataclass
class Retries:
    """Pauses that double, with jitter so that many who failed together do not come back together."""

    tries: int = 6
    first: float = 1.0
    most: float = 20.0
    pause: Callable[[float], object] = time.sleep
    jitter: Callable[[], float] = random.random
    _failed: int = field(default=0, init=False)

    def wait(self, failure: StepFailed, gained: int = 0) -> None:
        """Pause, or raise what failed when that is no use (any more). Where the try gained enough bytes the
        other side is alive, and counting begins anew."""
        self._failed = 1 if gained >= PROGRESS else self._failed + 1
        tries = min(self.tries, 3) if failure.reason is EndReason.DATA_GONE else self.tries
        asked = failure.retry_after or 0.0
        if failure.reason not in AGAIN or self._failed >= tries or asked > LONGEST_WAIT:
            raise failure
        backoff = min(self.first * 2 ** (self._failed - 1), self.most)
        self.pause(max(asked, backoff * (0.5 + self.jitter() / 2)))
