"""A table or a loop as one test: every case is tried, and all that fail are named at once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

SHOWN = 300
Test = Callable[..., Any]


def each(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Test], Test]:
    """Stands where `pytest.mark.parametrize` would make a test of each case; several may be stacked. Fixtures
    are made once for all cases."""
    words = names.split(",") if isinstance(names, str) else names
    arguments = [word.strip() for word in words]
    table = [(case if len(arguments) > 1 else (case,)) for case in cases]
    assert table, "no cases"

    def failed(case: tuple[Any, ...], error: BaseException) -> str:
        if isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit):
            raise error
        text = f"{type(error).__name__}: {error}"[:SHOWN]
        return f"{', '.join(f'{value!r:.120}' for value in case)}: {text}"

    def decorate(test: Test) -> Test:
        def end(problems: list[str]) -> None:
            if problems:
                pytest.fail(f"{len(problems)} of {len(table)}:\n" + "\n".join(problems))

        @functools.wraps(test)
        def plain(**fixtures: Any) -> None:
            problems = []
            for case in table:
                try:
                    test(**dict(zip(arguments, case, strict=True)), **fixtures)
                except (Exception, pytest.fail.Exception) as error:
                    problems.append(failed(case, error))
            end(problems)

        @functools.wraps(test)
        async def waiting(**fixtures: Any) -> None:
            problems = []
            for case in table:
                try:
                    await test(**dict(zip(arguments, case, strict=True)), **fixtures)
                except (Exception, pytest.fail.Exception) as error:
                    problems.append(failed(case, error))
            end(problems)

        whole: Test = waiting if inspect.iscoroutinefunction(test) else plain
        signature = inspect.signature(test)
        fixtures = [value for name, value in signature.parameters.items() if name not in arguments]
        whole.__signature__ = signature.replace(parameters=fixtures)  # type: ignore[attr-defined]
        return whole

    return decorate
