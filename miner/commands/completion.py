"""What a shell offers at the TAB key: profiles, policies, task types and jobs. Never an error, whatever is
wrong: a shell would print it into the line that is being written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

#: Jobs that are offered, the newest first.
_JOBS = 50


def profiles(incomplete: str) -> list[str]:
    from core.profile.load import profile_files
    from miner.commands.chosen import profile_places

    with contextlib.suppress(Exception):
        return _beginning(profile_files(profile_places(None)), incomplete)
    return []


def policies(incomplete: str) -> list[str]:
    from miner.commands.chosen import policy_places
    from miner.offers.policies.load import policy_files

    with contextlib.suppress(Exception):
        return _beginning(policy_files(policy_places(None)), incomplete)
    return []


def task_types(incomplete: str) -> list[str]:
    from core.profile.words import TASK_WORDS

    return _beginning(TASK_WORDS, incomplete)


def jobs(incomplete: str) -> list[tuple[str, str]]:
    """Numbers, with what each job is."""
    from miner.offers.reading import reading
    from miner.settings import load_settings
    from miner.store import work

    with contextlib.suppress(Exception), reading(load_settings().data_dir) as connection:
        rows = work.newest_jobs(connection, _JOBS)
        shown = [(str(row.id), f"{row.state.value} {row.task_type.value} {row.model}") for row in rows]
        shown += [(row.task_id, f"job {row.id}") for row in rows if incomplete]
        return [one for one in shown if one[0].startswith(incomplete)]
    return []


def _beginning(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]
