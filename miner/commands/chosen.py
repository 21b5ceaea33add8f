"""What commands take from the settings: the host, policy and profile in force, and where files lie."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from core.hardware import Hardware
    from miner.offers.policies.choice import InForce
    from miner.settings import Settings


def profile_places(directories: Sequence[Path] | None) -> list[Path]:
    """`--dir`, then PROFILE_DIR."""
    from miner.settings import load_settings

    return [*(directories or ()), load_settings().profile_dir]


def policy_places(directories: Sequence[Path] | None) -> list[Path]:
    """`--dir`, then POLICY_DIR."""
    from miner.settings import load_settings

    return [*(directories or ()), load_settings().policy_dir]


def gpus_here(settings: Settings) -> Hardware | None:
    """This host, as a daemon would see it. None where no GPU was found and GPUS does not say so: such a
    machine is one to plan on, not one to train on."""
    from miner.fleet.build import CPU, look_once

    installed = look_once(settings)[0].stock.installed
    if installed is None or (installed.gpus.is_cpu and settings.gpus != CPU):
        return None
    return installed


def chosen_here() -> InForce:
    """What a daemon with these settings would use here, as doctor says it and its status shows it."""
    from miner.fleet.build import look_once
    from miner.offers.policies.choice import in_force
    from miner.settings import load_settings

    settings = load_settings()
    return in_force(settings, look_once(settings)[0].stock.installed)


def chosen_or_why_not() -> InForce | None:
    """The reason on stderr."""
    from core.errors import ConfigError

    try:
        return chosen_here()
    except ConfigError as error:
        typer.echo(f"what is in force cannot be used: {error}", err=True)
        return None


def tell_where_not_in_force(word: str, name: str) -> None:
    """On stderr, for somebody who looks at one `word` (policy or profile) while another is in force."""
    from miner.offers.policies.choice import Chosen, not_in_force

    found = chosen_or_why_not()
    if found is None:
        return
    used = found.profile if word == "profile" else found.policy
    why = found.why_profile if word == "profile" else found.why_policy
    stem = Path(name).stem if name.endswith((".yaml", ".yml")) else name
    if stem != used.name:
        typer.echo(not_in_force(word, stem, used.name, Chosen(used.name, why)), err=True)
