"""Every rule of admission that can be reproduced here, one finding each, in the order of validators.

Rules and limits are in `rules.py`. A finding is passed, failed, or cannot be known here with what to do by
hand: what depends on a closed detector, on others' machines or on the rest of the field is not called passed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from core.domain.units import show_bytes
from miner.tournament.check.arguments import check_arguments
from miner.tournament.check.copies import check_copies, check_distinct
from miner.tournament.check.dockerfiles import check_dockerfiles
from miner.tournament.check.entering import check_datasets, check_limits, check_times
from miner.tournament.check.entry import CheckedEntry, FindingState, RuleFinding, is_whole_commit
from miner.tournament.check.licence import check_licence
from miner.tournament.check.sources import check_obfuscation, check_weights
from miner.tournament.checkout import few, is_local, uncommitted_files
from miner.tournament.rules import CLONE_LIMIT_S, LARGE_REPOSITORY_BYTES

#: Two of the steps of admission clone it: the detector and the comparison of the licence.
CLONES = 2


def check_commit(entry: CheckedEntry) -> RuleFinding:
    """Whether a validator would find the commit; admission does not look, the first task would fail."""
    rule, commit = "commit", entry.clone.commit
    notes = [f"checked: {commit}"]
    if entry.asked and not is_whole_commit(entry.asked):
        notes.append(f"{entry.asked} is short for it: settings and validators want all 40 digits")
    if is_local(entry.source) and (changed := uncommitted_files(Path(entry.source))):
        notes.append(f"not committed, so not checked: {few(changed)}")
    if (entry.tree / ".gitmodules").exists():
        notes.append("it has submodules, which validators do not fetch")
    remote = entry.remote
    if remote is None:
        why = "not asked, --offline" if entry.offline else "the checkout has no remote"
        text = f"it is in {entry.source}; whether it is pushed cannot be known ({why})"
        to_do = "push it, then check the address: god-miner tournament check URL --commit COMMIT"
        return RuleFinding(1, rule, FindingState.UNKNOWN, text, tuple(notes), to_do)
    if remote.clone is not None:
        text = f"a plain clone of {remote.url} has it"
        return RuleFinding(1, rule, FindingState.PASSED, text, tuple(notes))
    if not remote.answered or remote.too_slow:
        text = f"it is in {entry.source}; {remote.problem}"
        return RuleFinding(
            1,
            rule,
            FindingState.UNKNOWN,
            text,
            tuple(notes),
            "check again when it answers",
        )
    to_do = "push a branch that holds it; a private repository needs TRAINING_REPO_*_URL, _COMMIT and _TOKEN"
    return RuleFinding(1, rule, FindingState.FAILED, remote.problem, tuple(notes), to_do)


def check_clone(entry: CheckedEntry) -> RuleFinding:
    """Whether it can be cloned in time, twice."""
    rule = "clone"
    far = entry.remote.clone if entry.remote else None
    clone = far or entry.clone
    if entry.remote and entry.remote.too_slow:
        to_do = "enter a repository without the history: god-miner tournament prepare DIR"
        return RuleFinding(3, rule, FindingState.FAILED, entry.remote.problem, to_do=to_do)
    size = f"{show_bytes(clone.size_bytes)} with its history, cloned in {clone.seconds:.1f} s"
    limit = f"validators wait {CLONE_LIMIT_S:g} s, {CLONES} times"
    if clone.size_bytes > LARGE_REPOSITORY_BYTES:
        text = f"{size}: large; {limit}"
        to_do = "enter a repository without the history: god-miner tournament prepare DIR"
        return RuleFinding(3, rule, FindingState.UNKNOWN, text, to_do=to_do)
    if far is not None:
        return RuleFinding(3, rule, FindingState.PASSED, f"{size}; {limit}")
    speed = show_bytes(entry.clone.size_bytes / CLONE_LIMIT_S)
    text = f"{size} from the disk; {limit}: {speed} a second are needed"
    return RuleFinding(3, rule, FindingState.PASSED, text)


CHECKS: tuple[Callable[[CheckedEntry], RuleFinding], ...] = (
    check_commit,
    check_licence,
    check_clone,
    check_obfuscation,
    check_copies,
    check_distinct,
    check_dockerfiles,
    check_weights,
    check_arguments,
    check_datasets,
    check_limits,
    check_times,
)


def run_checks(entry: CheckedEntry) -> Iterator[RuleFinding]:
    for check in CHECKS:
        yield check(entry)


def is_admitted(findings: list[RuleFinding]) -> bool:
    """Whether nothing is known to be wrong."""
    return all(finding.state is not FindingState.FAILED for finding in findings)
