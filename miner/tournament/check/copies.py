"""Rules 5 and 6: what decides whether two entries are copies of each other.

T0 is the same commit, T1 the same digest over normalized texts: both exclude every entry that shares it,
except the champion. T2 is a language model's comparison of each pair, approved by a person.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePath

from miner.backends.docker.images import BuildFailed, source_root
from miner.tournament.check.entry import CheckedEntry, FindingState, RuleFinding
from miner.tournament.checkout import CloneFailed, read_inside, tracked_files

#: Parts of a path, names and endings that the digest leaves out. Pictures and archives hold zero bytes, which
#: leaves them out anyway; of text files only .svg is not certain.
LEFT_OUT_PARTS = frozenset(
    {
        *(".git", ".hg", ".svn", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache"),
        *("node_modules", "dist", "build", ".next", ".venv", "venv"),
    }
)
LEFT_OUT_NAMES = frozenset({"LICENSE", "LICENSE.md", "NOTICE"})
LEFT_OUT_SUFFIXES = frozenset(
    {
        *(".png", ".jpg", ".jpeg", ".gif", ".webp", ".ico", ".svg", ".pdf"),
        *(".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z"),
        *(".bin", ".pt", ".pth", ".safetensors", ".onnx", ".npy", ".npz", ".lock"),
    }
)
#: A zero byte among so many makes a file binary.
LOOKED_AT_BYTES = 4096
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
    ("trainer/scoring/pictures.py", "chooses pictures' checkpoints by the evaluator's loss"),
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
