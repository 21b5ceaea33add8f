"""Goldens: what this tree answers, written down before a refactoring and compared after it.

    goldens.py dump OUT.json.gz [--only SECTION ...]
    goldens.py compare OLD NEW [--but FIELD ...]
    goldens.py against [COMMIT] [--only SECTION ...] [--but FIELD ...]

Sections: plans, offers, tour, reads, losses. Each commit dumps with its own copy of this script, which knows
the names of its modules; `against` dumps another commit in a worktree of its own, then this tree. Losses need
GOD_MINER_TRAINING_PYTHON. A FIELD is a pattern like `plans:plan.reasons.*` or `*.profile_hash`: dotted keys
of a case without the numbers of a list.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import fields, is_dataclass
from enum import Enum
from fnmatch import fnmatchcase
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: The commit that `make goldens` compares with: one that has this script.
BASE = "bccf3fdac9c5ead3c2147b3d4544614490fc84ee"
Cases = dict[str, Any]

# Values that differ from run to run

VOLATILE = (
    (re.compile(re.escape(str(ROOT))), "ROOT"),
    (re.compile(r"/[^\s\"']*/goldens-[a-z0-9_]+"), "TMP"),
    (re.compile(r"(127\.0\.0\.1|localhost):\d{4,5}"), r"\1:PORT"),
    (re.compile(r"\b5[1-9A-HJ-NP-Za-km-z]{47}\b"), "HOTKEY"),
    (re.compile(r"\b\d+-\d+-[0-9a-f]{8}\b"), "ATTEMPT"),
    (re.compile(r"^\d{5,}\.(\d+)$"), r"INODE.\1"),
    (re.compile(r"(\d+ checked in) [\d.]+ s"), r"\1 SECONDS"),
    (re.compile(r'("port": )\d{5}'), r"\1PORT"),
)


def plain(value: Any) -> Any:
    """JSON of records, tuples with names and enumerations, without what differs from run to run."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str):
        for pattern, word in VOLATILE:
            value = pattern.sub(word, value)
        return value
    if isinstance(value, dict):
        return {
            str(plain(key)): "TIME"
            if key == "at" and is_now(one)
            else "PORT"
            if key == "port"
            else plain(one)
            for key, one in value.items()
        }
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if hasattr(value, "model_dump"):
        return plain(value.model_dump(mode="json"))
    if is_dataclass(value) and not isinstance(value, type):
        return {one.name: plain(getattr(value, one.name)) for one in fields(value)}
    if isinstance(value, set | frozenset):
        return sorted(map(plain, value), key=repr)
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value if value is None or isinstance(value, bool | int | float) else plain(str(value))


def is_now(at: Any) -> bool:
    return isinstance(at, float) and abs(time.clock_gettime(time.CLOCK_REALTIME) - at) < 86_400


# Plans: every shipped profile, machine, task and model

MODELS = (
    "facebook/opt-125m",
    "meta-llama/Llama-3.2-1B",
    "Qwen/Qwen2.5-3B",
    "meta-llama/Llama-3.1-8B",
    "google/gemma-2-9b",
    "mistralai/Mixtral-8x7B-v0.1",
    "Qwen/Qwen2.5-32B",
    "meta-llama/Llama-3.1-70B",
)
MACHINES = ("1xRTX-4090", "1xH100", "4xH100", "8xH100", "cpu")
LADDER_EVERY, LADDER_STEPS = 7, 12


def profiles() -> list[str]:
    return sorted(path.stem for path in (ROOT / "configs/profiles").glob("*.yaml"))


def policies() -> list[str]:
    return sorted(path.stem for path in (ROOT / "configs/policies").glob("*.yaml"))


def plans(profile: str) -> Cases:
    """Plan, configuration and command; of every seventh feasible plan also the steps after memory ran out."""
    from core.data.facts import assumed_facts
    from core.domain.errors import GodMinerError
    from core.domain.hardware import Hardware, parse_gpus
    from core.domain.tasks import ImageModelType, TaskType
    from core.models.identify import facts_from_name
    from core.planning.oom import OutOfMemory, next_after_oom
    from core.planning.plan import TaskSpec
    from core.planning.planner import plan_task
    from core.profile.resolve import load_profile
    from core.recipes.dry_run import example_inputs
    from core.recipes.render import render

    loaded, cases = load_profile(profile), Cases()
    texts = [kind for kind in TaskType if kind.is_text]
    wanted: list[tuple[Any, ...]] = [
        *itertools.product(MACHINES, texts, MODELS, (1.0, 4.5), (None,)),
        *(
            (m, TaskType.IMAGE, k.value, h, k)
            for m, k, h in itertools.product(MACHINES, ImageModelType, (0.75, 2.0))
        ),
    ]
    for number, (machine, task, model, hours, image) in enumerate(wanted):
        plan = plan_task(
            TaskSpec(task_type=task, hours=hours, image_type=image),
            facts_from_name(model, None, image),
            assumed_facts(task, None if image else 20_000, image_type=image),
            Hardware(gpus=parse_gpus(machine), cpu_cores=64, memory_bytes=512 * 10**9),
            loaded,
        )
        case: Cases = {"plan": plain(plan)}
        cases[f"{profile} {machine} {task.word} {model} {hours}"] = case
        if not plan.verdict.feasible:
            continue
        try:
            run = render(plan, example_inputs(task, model))
            case |= plain({"config": run.config, "command": run.command, "env": run.env, "notes": run.notes})
        except GodMinerError as error:
            case["error"] = plain(str(error))
        if number % LADDER_EVERY == 0:
            rungs = [plan]
            memory, left = OutOfMemory(moment="train"), hours - 60 / 3600
            while len(rungs) <= LADDER_STEPS and (lower := next_after_oom(rungs[-1], memory, left)):
                rungs.append(lower)
            case["ladder"] = [rung.oom_steps[-1] for rung in rungs[1:]]
    return cases


# Offers: decisions about seeded synthetic offers, one after the other

OFFERS, ODD_EVERY = 5_000, 9


def offers(policy: str) -> Cases:
    """Every part of each decision, while earlier ones hold their GPUs; also of odd ones, each alone."""
    from random import Random

    from core.domain.hardware import Hardware, parse_gpus
    from core.profile.resolve import load_profile
    from miner.offers.backtest.replay import replay
    from miner.offers.backtest.synthetic import synthetic_offers
    from miner.offers.policies.load import load_policy

    draw, loaded = Random(1), load_policy(policy)  # noqa: S311 - repeatable on purpose
    cases: Cases = {}
    gpus = Hardware(gpus=parse_gpus(loaded.hardware or "4xH100"))
    profile = load_profile(loaded.profile or "h100x4-strategy")
    asked = list(itertools.islice(synthetic_offers(7, days=365, per_day=60), OFFERS))
    for past in asked[::ODD_EVERY]:
        count, hours = past.offer.model_params_count or 10**9, past.offer.hours_to_complete
        changes: dict[str, Any] = draw.choice(
            [
                {"model_params_count": count * draw.choice([5, 50])},
                {"model_params_count": draw.choice([0, 7, 10**13])},
                {"hours_to_complete": hours * draw.choice([0.01, 0.25, 4])},
                {"model": draw.choice(["no/such-model", "odd", "a/Mixtral-8x22B-AWQ", "b/sdxl-7B"])},
                {"ds_size": draw.choice([0, 1, 10**7])},
            ]
        )
        name = f"{policy} odd {past.offer.task_id}"
        odd = past._replace(offer=past.offer.model_copy(update=changes))
        try:
            cases[name] = plain(replay([odd], loaded, profile, gpus)[0])
        except ArithmeticError as error:
            cases[name] = plain({"historical": odd, "error": repr(error)})
    entries = replay(asked, loaded, profile, gpus)
    return cases | {f"{policy} {entry.historical.offer.task_id}": plain(entry) for entry in entries}


# Tour: the replies of a daemon to the development validator


def tour(_: str) -> Cases:
    from miner.dev.tour import run_tour

    with tempfile.TemporaryDirectory(prefix="goldens-") as folder:
        result = run_tour(Path(folder) / "tour")
    found = result.as_json()
    return {
        f"{number:02} {step['title']}": {**plain(step), "latency_ms": None}
        for number, step in enumerate(found["steps"])
    } | {"end": {"held": found["held"], "exit_code": found["exit_code"]}}


# Reads: the operator's routes and the reading commands, over one stored fixture


def reads(_: str) -> Cases:
    """The answers; other addresses of the network are never asked."""
    from scripts.goldens_reads import read_all

    with tempfile.TemporaryDirectory(prefix="goldens-") as folder:
        return dict(plain(read_all(Path(folder), {"PROFILE": profiles(), "POLICY": policies()})))


# Losses: what seeded trainings on the CPU report


def trainings() -> Iterable[str]:
    """Seeded trainings by trainer and method, if there is a training environment."""
    methods = ("InstructTextTask full", "InstructTextTask lora", "DpoTask lora")
    known = [f"{engine} {one}" for engine in ("native", "axolotl") for one in methods]
    return known if os.environ.get("GOD_MINER_TRAINING_PYTHON") else []


def losses(training: str) -> Cases:
    words = [os.environ["GOD_MINER_TRAINING_PYTHON"], "-m", "scripts.goldens_losses", training]
    done = subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    return {training: plain(json.loads(done.stdout.splitlines()[-1]))}


# Dumps


SECTIONS: dict[str, tuple[Callable[[str], Cases], Callable[[], Iterable[str]]]] = {
    "reads": (reads, lambda: ("",)),  # the longest first
    "plans": (plans, profiles),
    "offers": (offers, lambda: ("conservative", "everything-feasible", "h100x4")),
    "tour": (tour, lambda: ("",)),
    "losses": (losses, trainings),
}


def part(section: str, argument: str) -> tuple[Cases, float]:
    """One share of a section, in a process of its own."""
    began = time.perf_counter()
    sys.path.insert(0, str(ROOT))
    return SECTIONS[section][0](argument), time.perf_counter() - began


def dump(out: Path, only: Iterable[str] = ()) -> None:
    os.environ["PYTHONPATH"] = str(ROOT)  # rather than the tree that the environment was made for
    wanted = tuple(only) or tuple(SECTIONS)
    found: dict[str, Cases] = {name: {} for name in wanted}
    seconds: dict[str, float] = defaultdict(float)
    began = time.perf_counter()
    with ProcessPoolExecutor(2, get_context("spawn"), max_tasks_per_child=1) as pool:
        running = {pool.submit(part, name, one): name for name in wanted for one in SECTIONS[name][1]()}
        for done in as_completed(running):
            cases, took = done.result()
            found[running[done]] |= cases
            seconds[running[done]] += took
    with gzip.open(out, "wt", compresslevel=5) as file:
        json.dump(found, file, sort_keys=True)
    for name in wanted:
        print(f"{name}: {len(found[name])} cases, {seconds[name]:.0f} s of a process")
    print(f"{out}: {time.perf_counter() - began:.0f} s on two cores")


# Comparisons


def flat(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys, without the numbers of a list, and their values."""
    if isinstance(value, dict) and value:
        for key, one in value.items():
            yield from flat(one, f"{name}.{key}" if name else key)
    elif isinstance(value, list) and value:
        for one in value:
            yield from flat(one, name)
    else:
        yield name, value


def by_name(case: Any) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = defaultdict(list)
    for name, value in flat(case):
        found[name].append(value)
    return found


def short(values: list[Any] | None) -> str:
    text = "nothing" if values is None else json.dumps(values[0] if len(values) == 1 else values)
    return text if len(text) <= 150 else f"{text[:147]}..."


def compare(old_file: Path, new_file: Path, but: Iterable[str] = ()) -> bool:
    """Print what differs, by section and field; True if nothing does that is not named in `but`."""
    old, new = (json.loads(gzip.decompress(file.read_bytes())) for file in (old_file, new_file))
    but, fine = tuple(but), True
    for section in sorted(old.keys() | new.keys()):
        before, after = old.get(section, {}), new.get(section, {})
        counts: dict[str, int] = defaultdict(int)
        examples: dict[str, str] = {}
        differing = 0
        for key in sorted(before.keys() | after.keys()):
            if key in before and key in after:
                if before[key] == after[key]:
                    continue
                was, is_now = by_name(before[key]), by_name(after[key])
                names = [name for name in was.keys() | is_now.keys() if was.get(name) != is_now.get(name)]
            else:
                was, is_now = {"(case)": [key in before]}, {"(case)": [key in after]}
                names = ["(case)"]
            differing += 1
            for name in names or ["(order)"]:
                counts[name] += 1
                if name not in examples:
                    examples[name] = f"{key}: {short(was.get(name))} → {short(is_now.get(name))}"
        print(f"{section}: {f'{differing} of {len(before)} cases differ' if differing else 'equal'}")
        for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
            named = any(fnmatchcase(name, one) or fnmatchcase(f"{section}:{name}", one) for one in but)
            fine = fine and named
            print(f"  {name} ×{count}{' (named)' if named else ''}\n    {examples[name]}")
    print("equal" if fine else "different")
    return fine


def against(commit: str, only: list[str], but: list[str]) -> bool:
    """Compare with another commit, which dumps by its own script."""
    with tempfile.TemporaryDirectory(prefix="goldens-") as folder:
        tree, old, new = (Path(folder) / name for name in ("tree", "old.json.gz", "new.json.gz"))
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "--detach", tree, commit], check=True)
        try:
            for root, out in ((tree, old), (ROOT, new)):
                words: list[str | Path] = [sys.executable, root / "scripts/goldens.py", "dump", out]
                subprocess.run([*words, *(["--only", *only] if only else [])], cwd=root, check=True)
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", tree], check=True)
        return compare(old, new, but)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("dump")
    one.add_argument("out", type=Path)
    two = commands.add_parser("compare")
    two.add_argument("old", type=Path)
    two.add_argument("new", type=Path)
    three = commands.add_parser("against")
    three.add_argument("commit", nargs="?", default=BASE)
    for each in (one, three):
        each.add_argument("--only", nargs="+", choices=list(SECTIONS), default=[])
    for each in (two, three):
        each.add_argument("--but", nargs="+", default=[], metavar="FIELD")
    asked = parser.parse_args()
    if asked.command == "dump":
        dump(asked.out, asked.only)
        return 0
    if asked.command == "compare":
        return 0 if compare(asked.old, asked.new, asked.but) else 1
    return 0 if against(asked.commit, asked.only, asked.but) else 1


if __name__ == "__main__":
    sys.exit(main())
