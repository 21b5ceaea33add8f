"""Every rule of admission that can be reproduced here, one finding each, in the order of validators.

Rules and limits are in `core/domain/tournament_rules.py`. A finding is passed, failed, or cannot be known
here with what to do by hand: what depends on a closed detector, on others' machines or on the rest of the
field is not called passed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path, PurePath
from urllib.parse import urlsplit

from core.domain.tournament_rules import (
    AS_OF,
    CLONE_LIMIT_S,
    DATASETS,
    LARGE_REPOSITORY_BYTES,
    LEFT_OUT_NAMES,
    LEFT_OUT_PARTS,
    LEFT_OUT_SUFFIXES,
    LOOKED_AT_BYTES,
    MOST_DATASETS,
    REGISTERED_FOR,
    TOURNAMENTS,
)
from core.domain.units import show_bytes
from core.domain.wire import TournamentType
from miner.backends.docker.images import BuildFailed, source_root
from miner.settings import Settings
from miner.settings.model import TrainingRepo
from miner.tournament.check.arguments import check_arguments
from miner.tournament.check.dockerfiles import check_dockerfiles
from miner.tournament.check.entry import (
    CheckedEntry,
    FindingState,
    RuleFinding,
    is_whole_commit,
    same_repository,
    site_answers,
)
from miner.tournament.check.licence import check_licence
from miner.tournament.check.review.rule import check_review
from miner.tournament.check.sources import check_obfuscation, check_weights
from miner.tournament.checkout import (
    CloneFailed,
    few,
    is_local,
    read_inside,
    tracked_files,
    uncommitted_files,
)
from miner.tournament.polite_client import SiteError
from miner.tournament.public_api import open_public_api
from miner.tournament.rules import next_start

# Rules 5 and 6: what decides whether two entries are copies of each other.
#
# T0 is the same commit, T1 the same digest over normalized texts: both exclude every entry that shares it,
# except the champion. T2 is a language model's comparison of each pair, approved by a person.

#: What runs in a training; whatever differs elsewhere counts for nothing.
LIVE_DIRECTORIES = ("trainer/", "core/")
MOST_FILES_NAMED = 8
#: What this trainer does beyond rendering a configuration: files, and what a comparison finds there.
MECHANISMS = (
    ("trainer/session/learning_rate.py", "tries learning rates on a share of the clock"),
    ("trainer/session/ema.py", "averages weights and submits what scores better"),
    ("trainer/session/submission.py", "exchanges a complete submission at each better score"),
    ("trainer/scoring/held_out.py", "scores with the validator's own measure on held-out rows"),
    ("trainer/rewards/sandbox.py", "runs reward functions in a sandbox"),
    ("trainer/native/train.py", "a trainer of its own for texts"),
    ("trainer/pictures/train.py", "trains pictures on the evaluator's measure, in its own stack"),
    ("core/planning/planner.py", "plans batch, memory and steps from the GPU and the data"),
    ("core/planning/oom.py", "plans again after a training ran out of memory"),
    ("core/runs/remedies.py", "knows what to change after each kind of failure"),
)


def normalized_text(text: str) -> str:
    """Without empty lines, lines of comment and runs of blanks; the order of lines stays."""
    lines = (line.strip() for line in text.splitlines())
    return "\n".join(" ".join(line.split()) for line in lines if line and not line.startswith("#"))


def tree_digest(directory: Path) -> str:
    """T1 of a checkout."""
    whole = hashlib.sha256()
    for name, text in _texts(directory):
        whole.update(os.fsencode(name) + b"\0" + text.encode() + b"\0")
    return whole.hexdigest()


def live_files(directory: Path) -> dict[str, str]:
    """The normalized digest of each file that a training may run."""
    return {
        name: hashlib.sha256(text.encode()).hexdigest()
        for name, text in _texts(directory)
        if name.startswith(LIVE_DIRECTORIES)
    }


def check_copies(entry: CheckedEntry) -> RuleFinding:
    own = tree_digest(entry.tree)
    notes = [f"T0 {entry.clone.commit}", f"T1 {own}"]
    equal = []
    for name, clone in entry.others:
        if clone.commit == entry.clone.commit:
            equal.append(f"{name}: the same commit (T0)")
        elif tree_digest(clone.directory) == own:
            equal.append(f"{name}: the same digest (T1)")
        else:
            notes.append(f"{name}: neither commit nor digest is the same")
    notes += [f"{name} cannot be compared: {why}" for name, why in entry.lost]
    if equal:
        return RuleFinding(
            5,
            "copies",
            FindingState.FAILED,
            f"equal to {'; '.join(equal)}",
            tuple(notes),
            "validators exclude every entry of such a group, and keep the fee: change what the trainer does",
        )
    text = (
        f"different from {len(entry.others)} other entries; the field is not known before it starts"
        if entry.others
        else "nothing to compare with; whoever enters this tree unchanged has these digests too"
    )
    to_do = "name entries that you know by --other; the repositories of winners are public"
    return RuleFinding(5, "copies", FindingState.UNKNOWN, text, tuple(notes), to_do)


def check_distinct(entry: CheckedEntry) -> RuleFinding:
    """Check what a person, or the validators' model, would find in a comparison."""
    files = set(entry.files())
    notes = [f"{file}: {what}" for file, what in MECHANISMS if file in files]
    own = live_files(entry.tree)
    if not own:
        notes.append(f"no code in {' or '.join(LIVE_DIRECTORIES)}: what it trains with is not known here")
    against = [(name, clone.directory) for name, clone in entry.others]
    shipped = _shipped()
    if shipped is not None:
        against.append(("god-miner as it is here", shipped))
    for name, directory in against:
        try:
            other = live_files(directory)
        except CloneFailed:  # god-miner without its history
            continue
        if not own:
            continue
        changed = sorted(file for file, digest in own.items() if other.get(file) != digest)
        if changed:
            more = f" and {len(changed) - MOST_FILES_NAMED} more" if len(changed) > MOST_FILES_NAMED else ""
            notes.append(f"code unlike {name}: {', '.join(changed[:MOST_FILES_NAMED])}{more}")
        else:
            notes.append(f"no code differs from {name}: all who enter that are copies of each other")
    return RuleFinding(
        6,
        "distinct (T2)",
        FindingState.UNKNOWN,
        "a model of theirs compares each pair, and a person approves: before round 2, the fee is lost",
        tuple(notes),
        "make sure that one mechanism which runs in this kind of task is your own: values of a profile, "
        "names and code that never runs do not count; with a paid key, the validators' own "
        "ops/tools/tournament/dedup_check.py compares two entries",
    )


def _shipped() -> Path | None:
    try:
        return source_root()
    except BuildFailed:
        return None


def _texts(directory: Path) -> Iterator[tuple[str, str]]:
    """The files that the digest is over, with their normalized texts."""
    for name in sorted(tracked_files(directory)):
        path = PurePath(name)
        if (
            not LEFT_OUT_PARTS.isdisjoint(path.parts)
            or path.name in LEFT_OUT_NAMES
            or path.suffix.lower() in LEFT_OUT_SUFFIXES
        ):
            continue
        try:
            content = read_inside(directory, directory / name)
        except OSError:
            continue
        if b"\0" not in content[:LOOKED_AT_BYTES]:
            yield name, normalized_text(content.decode("utf-8", "replace"))


# — rules of entering: datasets, limits of the account, times


def check_datasets(entry: CheckedEntry) -> RuleFinding:
    rule = "requested data sets"
    if entry.settings is None:
        to_do = "correct the settings, then check again"
        theirs = re.search(r"TRAINING_REPO_\w+_DATASETS", entry.settings_problem)
        state = FindingState.FAILED if theirs else FindingState.UNKNOWN
        return RuleFinding(10, rule, state, entry.settings_problem, to_do=to_do)
    problems, asked = [], 0
    for kind, repo in entered(entry):
        asked += len(repo.datasets)
        setting = f"TRAINING_REPO_{kind.name}_DATASETS"
        unknown = [name for name in repo.datasets if name not in DATASETS]
        if repo.datasets and kind is TournamentType.IMAGE:
            problems.append(f"{setting}: entries for image tournaments get none")
        elif unknown:
            problems.append(f"{setting}: not on the list, so validators leave it out: {', '.join(unknown)}")
    if problems:
        to_do = f"name at most {MOST_DATASETS} of these: {', '.join(DATASETS)}"
        return RuleFinding(10, rule, FindingState.FAILED, problems[0], tuple(problems[1:]), to_do)
    text = f"{asked} asked for, all on the list of {AS_OF}" if asked else "none asked for"
    return RuleFinding(10, rule, FindingState.PASSED, text)


def check_limits(entry: CheckedEntry) -> RuleFinding:
    """Check the limits of one entry per address, account and coldkey. Other entries are unknown here."""
    rule = "limits and fees"
    money = read_money(entry)
    notes = [*money.notes, "the fee is taken once, however long validators wait for a full field"]
    accounts = sorted({account_of(repo.url) for _, repo in entered(entry)} - {""})
    if entry.settings is None:
        notes.append(entry.settings_problem)
    elif not accounts:
        names = ", ".join(f"TRAINING_REPO_{kind.name}_URL" for kind in entry.kinds)
        notes.append(f"nothing is entered yet: {names} and _COMMIT are not set")
    for kind, repo in entered(entry):
        if repo.commit.lower() != entry.clone.commit:
            notes.append(f"TRAINING_REPO_{kind.name}_COMMIT is {repo.commit[:12]}, not what was checked")
        if entry.remote and not same_repository(repo.url, entry.remote.url):
            notes.append(f"TRAINING_REPO_{kind.name}_URL is {repo.url}, not what was checked")
    if money.balance is not None and money.balance < money.due:
        text = f"the coldkey has {money.balance:g} TAO at the validators, and the fees are {money.due:g} TAO"
        to_do = "transfer the rest to the validators' collection address before the start"
        return RuleFinding(11, rule, FindingState.FAILED, text, tuple(notes), to_do)
    account = f"your account {', '.join(accounts)}" if accounts else "your account at the code host"
    text = f"one entry per address of a daemon, per coldkey and per account: {account}"
    to_do = "make sure that no other entry shares these"
    if money.balance is None:
        to_do += f", and that your coldkey has {money.due:g} TAO at the validators"
    return RuleFinding(11, rule, FindingState.UNKNOWN, text, tuple(notes), to_do)


@dataclass(frozen=True)
class EntryMoney:
    """The fee of entering, and the balance of the coldkey at the validators."""

    due: float
    #: None where it is not known.
    balance: float | None
    notes: tuple[str, ...]


def read_money(entry: CheckedEntry) -> EntryMoney:
    """By the public API; where it does not answer, by the stored fees."""
    fees = {kind: rules.fee_tao for kind, rules in TOURNAMENTS.items()}
    origin, balance, notes = f"as of {AS_OF}", None, []
    settings = entry.settings
    if settings is not None and not entry.offline and site_answers(settings.public_api_url):
        with open_public_api(settings) as api:
            try:
                found, source = api.fees()
                fees |= found
                origin = "by the public API" if source.stale is None else f"stored, {source.stale}"
                coldkey = coldkey_address(settings)
                if coldkey is None:
                    notes.append("the wallet's coldkeypub.txt is not here: the balance is not known")
                else:
                    paid, source = api.balance(coldkey)
                    balance = paid if source.stale is None else None
                    notes.append(f"balance {paid:g} TAO" + (f" ({source.stale})" if source.stale else ""))
            except SiteError as error:
                notes.append(f"the public API: {error}")
    shown = [f"fee {kind}: {fees[kind]:g} TAO, {origin}, never refunded" for kind in entry.kinds]
    return EntryMoney(sum(fees[kind] for kind in entry.kinds), balance, (*shown, *notes))


def coldkey_address(settings: Settings) -> str | None:
    """The coldkey's public address, from the wallet's own file."""
    file = settings.wallet_path.expanduser() / settings.wallet_name / "coldkeypub.txt"
    try:
        found = json.loads(file.read_bytes()).get("ss58Address")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def check_times(entry: CheckedEntry) -> RuleFinding:
    notes, late = [], []
    for kind in entry.kinds:
        start = next_start(kind, entry.now)
        last = start - REGISTERED_FOR
        if entry.now > last:
            late.append(str(kind))
            following = next_start(kind, start + timedelta(hours=1))
            notes.append(
                f"{kind} may begin {start:%Y-%m-%d %H:%M} UTC: too late unless registered before "
                f"{last:%H:%M}; then {following:%Y-%m-%d %H:%M} UTC"
            )
        else:
            notes.append(
                f"{kind} may begin {start:%Y-%m-%d %H:%M} UTC: be registered by {last:%Y-%m-%d %H:%M} UTC"
            )
    notes.append("validators clone the commit for every task: leave it and the repository alone until Friday")
    text = (
        f"less than an hour to the next start: {', '.join(late)}"
        if late
        else "registered an hour before, the daemon reachable, the commit unchanged until Friday"
    )
    return RuleFinding(
        12,
        "times",
        FindingState.UNKNOWN,
        text,
        tuple(notes),
        "see when your hotkey was registered: god-miner chain status",
    )


def entered(entry: CheckedEntry) -> list[tuple[TournamentType, TrainingRepo]]:
    """Return the entries in the settings, of the kinds that are checked."""
    if entry.settings is None:
        return []
    found = ((kind, entry.settings.training_repo(kind)) for kind in entry.kinds)
    return [(kind, repo) for kind, repo in found if repo is not None]


def account_of(url: str) -> str:
    """The account that validators count by; an address with less than two parts has none."""
    parts = [part for part in urlsplit(url).path.strip("/").split("/") if part]
    return parts[0].lower() if len(parts) >= 2 else ""


#: Two of the steps of admission clone it: the detector and the comparison of the licence.
CLONES = 2


def check_commit(entry: CheckedEntry) -> RuleFinding:
    """Check that a validator would find the commit; admission does not look, the first task would fail."""
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
    """Check that the repository can be cloned in time, twice."""
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
    check_review,
)


def run_checks(entry: CheckedEntry) -> Iterator[RuleFinding]:
    for check in CHECKS:
        yield check(entry)


def is_admitted(findings: list[RuleFinding]) -> bool:
    """Return True if no finding failed."""
    return all(finding.state is not FindingState.FAILED for finding in findings)
