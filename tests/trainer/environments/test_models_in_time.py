"""A call is given up when its time is over; what is Python ends then."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from trainer.environments.models import in_time
from trainer.errors import BadModel


class Panic(BaseException):
    """Like the panic of the tokenizers library."""


def test_a_call_that_ends_in_time_is_answered() -> None:
    assert in_time(lambda: 7, 60.0) == 7


@pytest.mark.parametrize(("raised", "seen"), [(KeyError("x"), KeyError), (Panic("onig"), BadModel)])
def test_a_failure_reaches_the_caller_and_a_panic_is_a_bad_model(
    raised: BaseException, seen: type[Exception]
) -> None:
    def fail() -> Any:
        raise raised

    with pytest.raises(seen):
        in_time(fail, 60.0)


def test_a_call_that_never_ends_is_ended() -> None:
    ended = threading.Event()

    def endless() -> None:
        try:
            while True:
                pass
        finally:
            ended.set()

    with pytest.raises(TimeoutError):
        in_time(endless, 0.2)
    assert ended.wait(60.0)
