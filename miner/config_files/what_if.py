"""Ask a child process what a change would do: it replays offers, plans tasks and parses files that somebody
is typing, which takes from a tenth of a second to many seconds of computing.

`worker` is the child's half. One question of a kind at a time: more would only take cores from trainings.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, TypeAdapter

from core.config.files import ConfigLayer, LoadedConfig
from core.domain.errors import ConfigError, GodMinerError, Problem
from core.domain.hardware import Hardware
from core.domain.records import Record
from core.profile.resolve import PROFILE_KIND, LoadedProfile
from miner.api.config_files import TextCheck
from miner.api.offers import BacktestComparison
from miner.offers.policies.load import POLICY_KIND, LoadedPolicy
from miner.support.child_main import ChildProtocol
from miner.support.subprocess import ChildSilent, run_order, worker_environment

#: A backtest of 10,000 offers takes some ten seconds on an idle core, a check one or two.
BACKTEST_SECONDS, CHECK_SECONDS = 120.0, 30.0


class WhatIfBusy(GodMinerError):
    """The same question is being answered to somebody else."""

    code = "what_if_busy"


class WhatIfFailed(GodMinerError):
    """The child ended without an answer."""

    code = "what_if_failed"


class LayerText(Record):
    file: str
    text: str


def layer_texts(config: LoadedConfig[Any]) -> tuple[LayerText, ...]:
    """Return what is in force as text: a file may have been edited since, and not be valid."""
    return tuple(LayerText(file=str(layer.file), text=layer.text) for layer in config.layers)


class TermsInForce(Record):
    """Policy, profile and hardware that a daemon decides and plans by."""

    policy: tuple[LayerText, ...]
    #: By dotted path, from settings.
    overrides: dict[str, JsonValue]
    profile: tuple[LayerText, ...]
    hardware: Hardware

    @classmethod
    def of(cls, policy: LoadedPolicy, profile: LoadedProfile, hardware: Hardware) -> TermsInForce:
        return cls(
            policy=layer_texts(policy),
            overrides=policy.overrides,
            profile=layer_texts(profile),
            hardware=hardware,
        )

    def loaded_policy(self) -> LoadedPolicy:
        layers = [ConfigLayer(POLICY_KIND, Path(one.file), one.text) for one in self.policy]
        return LoadedPolicy(layers[-1].name, layers, self.overrides)

    def loaded_profile(self) -> LoadedProfile:
        layers = [ConfigLayer(PROFILE_KIND, Path(one.file), one.text) for one in self.profile]
        return LoadedProfile(layers[-1].name, layers)


class BacktestOrder(Record):
    order: Literal["backtest"] = "backtest"
    store_dir: str
    since: float
    now: float
    terms: TermsInForce
    #: What is tried, by dotted path.
    changes: dict[str, JsonValue]


class CheckOrder(Record):
    """Check a text that is to become an operator's file."""

    order: Literal["check"] = "check"
    kind: str
    name: str
    #: Where the file is, or will be, and the operator's directory of such files.
    file: str
    directory: str
    text: str
    #: The saved text, or None if there is none.
    saved: str | None
    #: Also report the effects of the edit.
    effects: bool
    terms: TermsInForce
    store_dir: str
    now: float


class BacktestDone(Record):
    event: Literal["backtest"] = "backtest"
    answer: BacktestComparison


class CheckDone(Record):
    event: Literal["check"] = "check"
    answer: TextCheck


class WhatIfRefused(Record):
    """A refusal of a wrong question, as a `ConfigError` states it."""

    event: Literal["refused"] = "refused"
    text: str
    problems: tuple[dict[str, str], ...] = ()


class WhatIfError(Record):
    event: Literal["failed"] = "failed"
    text: str


WhatIfOrder = Annotated[BacktestOrder | CheckOrder, Field(discriminator="order")]
WhatIfEvent = Annotated[BacktestDone | CheckDone | WhatIfRefused | WhatIfError, Field(discriminator="event")]
PROTOCOL: ChildProtocol[WhatIfOrder, WhatIfEvent] = ChildProtocol(
    "miner.config_files.worker", TypeAdapter(WhatIfOrder), TypeAdapter(WhatIfEvent), max_line=16 << 20
)


class WhatIf:
    """Answers one question of a kind at a time."""

    def __init__(self) -> None:
        self._asked: set[str] = set()

    async def backtest(self, order: BacktestOrder) -> BacktestComparison:
        """Replay past offers with changed values. `ConfigError` if the values are wrong, `WhatIfBusy`,
        `WhatIfFailed`."""
        event = await self._ask(order, "backtest", BACKTEST_SECONDS)
        assert isinstance(event, BacktestDone)
        return event.answer

    async def check(self, order: CheckOrder, what: str) -> TextCheck:
        """Check a text. `what` is the kind of question. `WhatIfBusy`, `WhatIfFailed`."""
        event = await self._ask(order, what, CHECK_SECONDS)
        assert isinstance(event, CheckDone)
        return event.answer

    async def _ask(self, order: WhatIfOrder, what: str, seconds: float) -> BacktestDone | CheckDone:
        """Return the child's answer. A caller that is cancelled ends the child."""
        if what in self._asked:
            raise WhatIfBusy(f"another {what} is running; ask again when it is over")
        self._asked.add(what)
        try:
            async with asyncio.timeout(seconds):
                reply = await run_order(PROTOCOL, order, lambda _: None, environment=worker_environment())
        except (TimeoutError, ChildSilent):
            raise WhatIfFailed(f"the {what} took longer than {seconds:g} s; ask for less") from None
        except OSError as error:
            raise WhatIfFailed(f"the {what} cannot be started: {error}") from None
        finally:
            self._asked.discard(what)
        if isinstance(reply.event, BacktestDone | CheckDone):
            return reply.event
        if isinstance(reply.event, WhatIfRefused):
            raise ConfigError(what, [Problem(**one) for one in reply.event.problems])
        text = reply.event.text if reply.event is not None else reply.ending
        raise WhatIfFailed(f"the {what} failed: {text}")
