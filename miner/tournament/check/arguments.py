"""Rule 9: the argument lines of all kinds of task, parsed by the entry points of the checked commit.

This is the only place where `check` runs code of the repository that it checks: `trainer.runner.command_line`
of the clone. bubblewrap closes off the network, the operator's files and other processes: the code sees its
own checkout and the packages of this installation, for a limited time and with limited output; what it writes
is in memory and ends with it. Where bubblewrap does not work, only this checkout's own code is run, and
another's if the operator trusts it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import select
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import core
from core.domain.records import printable
from core.domain.tournament_rules import CACHE, CHECKPOINTS, TEXT_DOCKERFILE
from core.system.files import temporary_tree
from miner.backends.base import AttemptSpec, Mount
from miner.backends.sandbox import REWARD_UIDS, Interpreter, Sandbox, detect_sandbox
from miner.tournament.check.dockerfiles import dockerfile_text, entry_point, first_dockerfile
from miner.tournament.check.entry import CheckedEntry, FindingState, RuleFinding
from miner.tournament.public_api import mapping, number
from miner.tournament.rules import TASKS, TournamentTask, repository_name

#: What no validator sends yet: an entry that refuses it would fail with their next version.
UNKNOWN_OPTION = ("--unknown-option", "1")
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
    by_hand = "build it and run it: god-miner tournament rehearse"
    if not (entry.tree / "trainer/runner/command_line.py").is_file():
        return _finding(
            FindingState.UNKNOWN,
            "no trainer of god-miner: how it parses its arguments is not known",
            to_do=by_hand,
        )
    tasks = [task for task in TASKS.values() if task.tournament in entry.kinds]
    if strange := _other_entry_points(entry.tree, tasks):
        text = f"{strange[0]}: how that parses its arguments is not known"
        return _finding(FindingState.UNKNOWN, text, strange[1:], by_hand)
    with temporary_tree("god-miner-check-") as folder:
        sandbox = find_sandbox(folder)
        if isinstance(sandbox, str) and not entry.trusted:
            to_do = f"install bubblewrap; or, if you trust this code, --trust; or {by_hand}"
            return _finding(
                FindingState.UNKNOWN, f"its code is not run without a sandbox: {sandbox}", to_do=to_do
            )
        confined = None if isinstance(sandbox, str) else sandbox
        answers, complaint = parse_all(entry.tree, tasks, confined)
    notes = [f"its code was run without a sandbox: {sandbox}"] if confined is None else []
    problems = [what for task in tasks for what in _problems(task, answers.get(task.name), complaint)]
    if problems:
        to_do = "the container would end at once: correct the entry point, or do not enter this kind"
        return _finding(FindingState.FAILED, problems[0], [*problems[1:], *notes], to_do)
    names = ", ".join(task.name for task in tasks)
    text = f"all {len(tasks)} are understood: {names}; anonymous models, {HOURS} hours, unknown options too"
    missing = sorted({str(task.tournament) for task in TASKS.values()} - {str(kind) for kind in entry.kinds})
    notes += [f"{kind}: not checked; --kind {kind} does" for kind in missing]
    return _finding(FindingState.PASSED, text, notes)


def _finding(state: FindingState, text: str, notes: Sequence[str] = (), to_do: str = "") -> RuleFinding:
    return RuleFinding(9, "argument lines", state, text, tuple(notes), to_do)


def _problems(task: TournamentTask, answer: Any, complaint: str) -> list[str]:
    if answer is None:
        return [f"{task.name}: no answer: {complaint}"]
    if "error" in answer:
        return [f"{task.name}: {printable(str(answer['error'])[:300])}"]
    return [f"{task.name}: {what}" for what in wrong_in_run(task, mapping(answer.get("run")))]


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


def parse_all(
    tree: Path, tasks: Sequence[TournamentTask], sandbox: Sandbox | None
) -> tuple[dict[str, Mapping[str, Any]], str]:
    """Return what the entry points make of each task, and the end of their complaints."""
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
    done = run_confined(_SCRIPT, tree, orders, sandbox)
    answers = {}
    for line in done.text.splitlines():
        if line.startswith("answer "):
            try:
                answer = mapping(json.loads(line.removeprefix("answer ")))
            except (ValueError, RecursionError):
                continue
            answers[str(answer.get("name"))] = answer
    return answers, done.complaint


def arguments_of(task: TournamentTask) -> list[str]:
    trigger = TRIGGER if task.image_type is not None else None
    return task.arguments(
        task_id=_TASK, model_id=MODEL, repository=_REPOSITORY, hours=HOURS, trigger_word=trigger
    )


def wrong_in_run(task: TournamentTask, run: Mapping[str, Any]) -> list[str]:
    """Return the differences between the run that was parsed and the one that was requested."""
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
        f"{name} is {printable(repr(found[name])[:200])}, not {value!r}"
        for name, value in expected.items()
        if found[name] != value
    ]
    began, deadline, end = (number(run.get(name)) or 0.0 for name in ("began_at", "deadline_at", "end_by"))
    seconds = deadline - began
    if abs(seconds - HOURS * 3600) > 1:
        wrong.append(f"{HOURS} hours are taken for {seconds / 3600:.2f}")
    if not end < deadline:
        wrong.append("it would not end before it is killed")
    coefficient = float(task.environment["KL_COEF"]) if "KL_COEF" in task.environment else None
    if run.get("kl_coefficient") != coefficient:
        found_text = printable(str(run.get("kl_coefficient"))[:200])
        wrong.append(f"kl_coefficient is {found_text}, not {coefficient}")
    return wrong


# — run a little code of the checked commit

LIMIT_S = 60.0
#: Of what it prints; a run that was understood has a few kilobytes.
MOST_OUTPUT = 4 * 1024**2
#: Of one process, and of each of the places in memory that it can write to.
MEMORY_BYTES, WRITTEN_BYTES = 4 * 1024**3, 64 * 1024**2
#: Of a user of its own. Older kernels count all of the operator's processes, where that is the user.
PROCESSES, PROCESSES_OF_OPERATOR = 256, 4096
_UID = REWARD_UIDS - 1


@dataclass(frozen=True)
class ConfinedOutput:
    """Output of confined code on both streams, and why it was ended early, if it was."""

    text: str
    #: The exit code, or the limit that was reached.
    ending: str

    @property
    def complaint(self) -> str:
        """The end of the run and its last line, for people."""
        last = self.text.strip().rpartition("\n")[2][-300:]
        return printable(f"{self.ending}: {last}" if last else self.ending)


def find_sandbox(folder: Path) -> Sandbox | str:
    """A sandbox that was tried out, with its files in the folder; or why there is none."""
    needs = {Path(sys.base_prefix), *_site_packages()}
    outside = sorted(path for path in needs if not path.is_relative_to("/usr"))
    interpreter = Interpreter(Path(os.path.realpath(sys.executable)), tuple(outside))
    is_root = os.geteuid() == 0
    processes = PROCESSES if is_root else PROCESSES_OF_OPERATOR
    visible, uid = (Path(core.__file__).parent,), _UID if is_root else None
    found = detect_sandbox(Sandbox(Path("bwrap"), interpreter, folder / "hosts", visible, uid, processes))
    return found if isinstance(found, str) else replace(found, memory_bytes=WRITTEN_BYTES)


def run_confined(
    script: str,
    tree: Path,
    order: str,
    sandbox: Sandbox | None,
    *,
    limit_s: float = LIMIT_S,
    most_output: int = MOST_OUTPUT,
) -> ConfinedOutput:
    """Run a Python script with the tree as the place of its modules and `order` as its standard input.

    Without a sandbox it has the operator's rights: time, memory and output are limited all the same."""
    tree = tree.resolve()
    with temporary_tree("god-miner-check-") as folder, _sealed(order) as given:
        scratch = folder.resolve()
        python = str(sandbox.interpreter.path) if sandbox else sys.executable
        command = [python, "-c", script, str(tree)]
        if sandbox is not None:
            spec = AttemptSpec("check", tuple(command), scratch, (Mount(tree, read_only=True),))
            command = sandbox.command(spec, command)
        process = subprocess.Popen(
            command,
            env=_environment(tree, scratch),
            cwd=scratch,
            stdin=given,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_limit_process,
        )
        try:
            return _limited_output(process, limit_s, most_output)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _sealed(text: str) -> BinaryIO:
    """The text in a file in memory that nobody can write to: through another, the code could fill a disk."""
    file = os.fdopen(os.memfd_create("order", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "w+b")
    file.write(text.encode())
    file.seek(0)  # also writes what is buffered
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return file


def _limited_output(process: subprocess.Popen[bytes], limit_s: float, most: int) -> ConfinedOutput:
    assert process.stdout is not None
    found, ends, limit = bytearray(), time.monotonic() + limit_s, ""
    with process.stdout as stream:
        while not limit:
            left = ends - time.monotonic()
            if left <= 0:
                limit = f"not done after {limit_s:g} s: ended"
            elif select.select([stream], [], [], left)[0]:
                piece = os.read(stream.fileno(), 65_536)
                if not piece:
                    break
                found += piece
                if len(found) > most:
                    limit = f"it printed more than {most / 1e6:.0f} MB: ended"
    if not limit:
        try:
            limit = f"exit code {process.wait(max(0.1, ends - time.monotonic()))}"
        except subprocess.TimeoutExpired:
            limit = f"not done after {limit_s:g} s: ended"
    return ConfinedOutput(found[:most].decode("utf-8", "replace"), limit)


def _environment(tree: Path, scratch: Path) -> dict[str, str]:
    """Nothing of the operator's: addresses of proxies may hold passwords."""
    return {
        "PATH": "/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "HOME": str(scratch),
        "GOD_MINER_WORK": str(scratch),
        "PYTHONPATH": os.pathsep.join(map(str, (tree, *_site_packages()))),
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def _site_packages() -> list[Path]:
    return list(dict.fromkeys(Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")))


def _limit_process() -> None:
    """In the child, before it becomes the sandbox; bubblewrap and all below it inherit these."""
    for kind, most in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, int(LIMIT_S)),
    ):
        _, hard = resource.getrlimit(kind)
        value = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (value, value))
    # When memory runs out, this goes before anything of the operator's.
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
