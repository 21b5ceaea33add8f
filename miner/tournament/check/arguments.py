"""Rule 9: the argument lines of all kinds of task, parsed by the entry points of the checked commit.

They run in a process of their own, with the clone as the place of their modules and a temporary directory for
scratch files. Of somebody else's repository nothing is run unless the operator trusts it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from miner.support.subprocess import PASSED_VARIABLES
from miner.tournament.check.dockerfiles import dockerfile_text, entry_point, first_dockerfile
from miner.tournament.check.entry import CheckedEntry, FindingState, RuleFinding
from miner.tournament.rules import CACHE, CHECKPOINTS, TASKS, TEXT_DOCKERFILE, TournamentTask, repository_name

LIMIT_S = 60.0
#: What no validator sends yet: an entry that refuses it would fail with their next version.
UNKNOWN_OPTION = ("--option-of-tomorrow", "1")
HOURS, MODEL, TRIGGER = 0.75, "org/model-1b", "sks"
_TASK, _HOTKEY = "0d63e5c4", "5GrwvaEF5zXb26Fz9rcQpDWS57CtERHpNehXCPcNoHGKutQY"
_REPOSITORY = repository_name("tourn_0123456789abcdef_20260921", _TASK, _HOTKEY)
#: Reads lines of {name, image, arguments, variables} and answers with runs, or why there is none.
_SCRIPT = """
import json, os, sys
from pathlib import Path
from trainer.runner import command_line
root = Path(sys.argv[1]).resolve()
if root not in Path(command_line.__file__).resolve().parents:
    raise SystemExit("the commit has no trainer.runner.command_line")
for line in sys.stdin:
    order = json.loads(line)
    os.environ.update(order["variables"])
    try:
        parse = command_line.image_run if order["image"] else command_line.text_run
        answer = {"run": json.loads(parse(order["arguments"]).model_dump_json())}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    for name in order["variables"]:
        os.environ.pop(name, None)
    print("answer " + json.dumps({"name": order["name"], **answer}), flush=True)
"""


def check_arguments(entry: CheckedEntry) -> RuleFinding:
    rule = "argument lines"
    if not entry.trusted:
        text = "the code of another's repository is not run here"
        to_do = "if you trust it: --trust; or build it and run it: god-miner tournament rehearse"
        return RuleFinding(9, rule, FindingState.UNKNOWN, text, to_do=to_do)
    if not (entry.tree / "trainer/runner/command_line.py").is_file():
        text = "no trainer of god-miner: how it parses its arguments is not known"
        to_do = "build it and run it with them: god-miner tournament rehearse"
        return RuleFinding(9, rule, FindingState.UNKNOWN, text, to_do=to_do)
    tasks = [task for task in TASKS.values() if task.tournament in entry.kinds]
    if strange := _other_entry_points(entry.tree, tasks):
        to_do = "build it and run it with them: god-miner tournament rehearse"
        text = f"{strange[0]}: how that parses its arguments is not known"
        return RuleFinding(9, rule, FindingState.UNKNOWN, text, tuple(strange[1:]), to_do)
    answers, complaint = parse_all(entry.tree, tasks)
    problems = []
    for task in tasks:
        answer = answers.get(task.name)
        if answer is None:
            problems.append(f"{task.name}: no answer: {complaint}")
        elif "error" in answer:
            problems.append(f"{task.name}: {str(answer['error'])[:300]}")
        else:
            problems += [f"{task.name}: {what}" for what in wrong_in_run(task, answer["run"])]
    if problems:
        to_do = "the container would end at once: mend the entry point, or do not enter this kind"
        return RuleFinding(9, rule, FindingState.FAILED, problems[0], tuple(problems[1:]), to_do)
    names = ", ".join(task.name for task in tasks)
    text = f"all {len(tasks)} are understood: {names}; anonymous models, {HOURS} hours, unknown options too"
    missing = sorted({str(task.tournament) for task in TASKS.values()} - {str(kind) for kind in entry.kinds})
    notes = tuple(f"{kind}: not checked; --kind {kind} does" for kind in missing)
    return RuleFinding(9, rule, FindingState.PASSED, text, notes)


def _other_entry_points(tree: Path, tasks: list[TournamentTask]) -> list[str]:
    """Entry points that are not god-miner's own: what is parsed here would say nothing of them."""
    strange = []
    for wanted in dict.fromkeys(task.dockerfile for task in tasks):
        name = first_dockerfile(tree, wanted)
        program = entry_point(dockerfile_text(tree, name)) if name else None
        module = "trainer.text" if wanted == TEXT_DOCKERFILE else "trainer.image"
        if name and program is not None and program[-2:] != ["-m", module]:
            strange.append(f"{name} starts {' '.join(program)[:100]}, not {module}")
    return strange


def parse_all(tree: Path, tasks: list[TournamentTask]) -> tuple[dict[str, Any], str]:
    """What the entry points make of each task, and the end of what they complained."""
    orders = "".join(
        json.dumps(
            {
                "name": task.name,
                "image": task.image_type is not None,
                "arguments": [*arguments_of(task), *UNKNOWN_OPTION],
                "variables": task.variables(task_id=_TASK, hotkey=_HOTKEY),
            }
        )
        + "\n"
        for task in tasks
    )
    with tempfile.TemporaryDirectory(prefix="god-miner-check-") as scratch:
        environment = {
            **{name: os.environ[name] for name in PASSED_VARIABLES if name in os.environ},
            "HOME": scratch,
            "GOD_MINER_WORK": scratch,
            "PYTHONPATH": str(tree.resolve()),
            "PYTHONSAFEPATH": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        try:
            done = subprocess.run(
                [sys.executable, "-c", _SCRIPT, str(tree)],
                input=orders,
                env=environment,
                cwd=scratch,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {}, f"nothing within {LIMIT_S:g} s"
    answers = {}
    for line in done.stdout.splitlines():
        if line.startswith("answer "):
            answer = json.loads(line.removeprefix("answer "))
            answers[answer["name"]] = answer
    last = done.stderr.strip().rpartition("\n")[2]
    return answers, last[-300:] or f"exit code {done.returncode}"


def arguments_of(task: TournamentTask) -> list[str]:
    trigger = TRIGGER if task.image_type is not None else None
    return task.arguments(
        task_id=_TASK, model_id=MODEL, repository=_REPOSITORY, hours=HOURS, trigger_word=trigger
    )


def wrong_in_run(task: TournamentTask, run: dict[str, Any]) -> list[str]:
    """Where the run that was understood is not the one that was asked for."""
    model = task.model_argument(MODEL).replace("/", "--")
    data = f"{_TASK}_tourn.zip" if task.image_type is not None else f"{_TASK}_train_data.json"
    expected = {
        "task_id": _TASK,
        "task_type": task.task_type or "ImageTask",
        "image_type": str(task.image_type) if task.image_type is not None else None,
        "model_path": f"{CACHE}/models/{model}",
        "data_path": f"{CACHE}/datasets/{data}",
        "submission_dir": f"{CHECKPOINTS}/{_TASK}/{_REPOSITORY}",
        "trigger_word": TRIGGER if task.image_type is not None else None,
    }
    found = {name: run.get(name) for name in expected}
    wrong = [
        f"{name} is {found[name]!r}, not {value!r}"
        for name, value in expected.items()
        if found[name] != value
    ]
    seconds = float(run.get("deadline_at") or 0) - float(run.get("began_at") or 0)
    if abs(seconds - HOURS * 3600) > 1:
        wrong.append(f"{HOURS} hours are taken for {seconds / 3600:.2f}")
    if not float(run.get("end_by") or 0) < float(run.get("deadline_at") or 0):
        wrong.append("it would not end before it is killed")
    coefficient = float(task.environment["KL_COEF"]) if "KL_COEF" in task.environment else None
    if run.get("kl_coefficient") != coefficient:
        wrong.append(f"kl_coefficient is {run.get('kl_coefficient')}, not {coefficient}")
    return wrong
