"""The argument lines, parsed by the entry points of a checkout."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from core.domain.wire import TournamentType
from miner.backends.docker.images import source_root
from miner.backends.sandbox import Sandbox
from miner.tournament.check.arguments import check_arguments, find_sandbox, run_confined
from miner.tournament.check.entry import CheckedEntry, FindingState
from tests.doubles.required import missing
from tests.miner.tournament.entries import open_small

pytestmark = pytest.mark.process


#: A module in the trainer's place that answers as the real one: `{body}` is what it makes of the arguments.
PARSER = """
import json, os
from types import SimpleNamespace
def text_run(arguments):
    given = dict(zip(arguments[::2], arguments[1::2]))
    run = made(given)
    return SimpleNamespace(model_dump_json=lambda: json.dumps(run))
image_run = text_run
made = lambda given: {body}
"""


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> CheckedEntry:
    """This checkout itself, in place of a clone of it."""
    entry = open_small(tmp_path_factory.mktemp("entry"), {"a": "a"})
    return replace(entry, clone=replace(entry.clone, directory=source_root()))


def small(folder: Path, body: str, **more: Any) -> CheckedEntry:
    files = {
        "trainer/__init__.py": "",
        "trainer/runner/__init__.py": "",
        "trainer/runner/command_line.py": PARSER.replace("{body}", body),
    }
    return open_small(folder, files, kinds=(TournamentType.TEXT,), **more)


def test_our_entry_points_understand_all_kinds(here: CheckedEntry) -> None:
    found = check_arguments(here)
    assert found.state is FindingState.PASSED, (found.text, found.notes)
    for name in ("instruct-kl", "chat", "dpo", "grpo", "continuous", "environment", "flux", "krea2"):
        assert name in found.text


def test_kinds_that_are_not_entered_are_said(here: CheckedEntry) -> None:
    found = check_arguments(replace(here, kinds=(TournamentType.ENVIRONMENT,)))
    assert found.state is FindingState.PASSED, (found.text, found.notes)
    assert "all 1 are understood: environment" in found.text
    assert found.notes[-2:] == (
        "image: not checked; --kind image does",
        "text: not checked; --kind text does",
    )


@pytest.mark.parametrize(
    ("body", "problems"),
    [
        ("given['--no-such-option']", ("instruct: KeyError",)),
        ("{}\nimport no_such_module", ("no_such_module",)),
        (
            "{'task_id': given['--task-id'], 'deadline_at': 3600, 'began_at': 0, 'end_by': 3500}",
            (
                "instruct: model_path is None",
                "instruct: 0.75 hours are taken for 1.00",
                "instruct-kl: kl_coefficient is None, not 0.5",
            ),
        ),
    ],
    ids=["an unknown option is refused", "not importable", "other paths and hours"],
)
def test_an_entry_point_that_takes_them_otherwise_fails(
    tmp_path: Path, body: str, problems: tuple[str, ...]
) -> None:
    found = check_arguments(small(tmp_path, body))
    assert found.state is FindingState.FAILED
    assert all(problem in "\n".join((found.text, *found.notes)) for problem in problems)


def test_an_entry_point_that_is_not_ours_is_not_vouched_for(tmp_path: Path) -> None:
    files = {
        "trainer/runner/command_line.py": "",
        "ops/docker/standalone-text-trainer.dockerfile": 'FROM a\nENTRYPOINT ["python", "train.py"]\n',
    }
    found = check_arguments(open_small(tmp_path, files, kinds=(TournamentType.TEXT,)))
    assert found.state is FindingState.UNKNOWN
    assert "starts python train.py, not trainer.text" in found.text


def test_another_trainer_is_not_run(tmp_path: Path) -> None:
    assert check_arguments(open_small(tmp_path, {"train.py": ""})).state is FindingState.UNKNOWN


def test_without_bubblewrap_another_owner_s_code_is_run_only_if_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tmp_path / "made"
    entry = small(tmp_path, f"open({str(made)!r}, 'w') and {{}}")
    assert check_arguments(entry).state is FindingState.FAILED
    assert not made.exists()
    monkeypatch.setenv("PATH", str(tmp_path))
    found = check_arguments(entry)
    assert found.state is FindingState.UNKNOWN
    assert "bubblewrap is not installed" in found.text
    assert "--trust" in found.to_do
    assert not made.exists()
    found = check_arguments(replace(entry, trusted=True))
    assert "its code was run without a sandbox" in found.notes[-1]
    assert made.exists()


@pytest.mark.parametrize(
    "printed", ["'answer {'", "'answer []'", "'answer ' + '[' * 100000", "'answer 1e999'"]
)
def test_answers_of_another_shape_are_no_answers(tmp_path: Path, printed: str) -> None:
    found = check_arguments(small(tmp_path, f"print({printed}) or {{'deadline_at': 'x', 'end_by': [1]}}"))
    assert found.state is FindingState.FAILED
    assert "0.75 hours are taken for 0.00" in "\n".join((found.text, *found.notes))


#: Prints what of each attempt came out; `report` is the last line.
HOSTILE = """
import json, os, socket, sys
order = json.loads(sys.stdin.read())
found = {}
def attempt(name, action):
    try:
        found[name] = str(action())
    except BaseException as error:
        found[name] = type(error).__name__
attempt("write_home", lambda: open(os.path.join(order["home"], "new"), "w").write("x"))
attempt("read_secret", lambda: open(order["secret"]).read())
attempt("write_tree", lambda: open(os.path.join(sys.argv[1], "new"), "w").write("x"))
attempt("write_packages", lambda: open(os.path.dirname(json.__file__) + "/new.py", "w").write("x"))
attempt("connect", lambda: socket.create_connection(("127.0.0.1", order["port"]), 2))
attempt("variables", lambda: sorted(os.environ.get(name) for name in ("HTTPS_PROXY", "HF_TOKEN", "MADE_UP")))
attempt("kill", lambda: os.kill(order["pid"], 0))
def fill():
    with open(os.path.join(os.environ["HOME"], "large"), "wb") as file:
        for _ in range(200):
            file.write(bytes(1 << 20))
attempt("fill", fill)
attempt("fill_input", lambda: os.write(0, bytes(1 << 20)))
attempt("reopen_input", lambda: os.write(os.open("/proc/self/fd/0", os.O_RDWR), b"x"))
def bomb():
    started = 0
    try:
        while started < 5000:
            if os.fork() == 0:
                import time
                time.sleep(60)
                os._exit(0)
            started += 1
    except OSError:
        return "refused"
    return started
attempt("bomb", bomb)
attempt("memory", lambda: len(bytearray(8 << 30)))
print(json.dumps(found), flush=True)
"""


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Sandbox:
    found = find_sandbox(tmp_path_factory.mktemp("sandbox"))
    return missing(found) if isinstance(found, str) else found


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "tree").mkdir()
    return tmp_path / "tree"


def test_a_hostile_entry_point_reaches_nothing(
    tmp_path: Path, tree: Path, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MADE_UP", "secret")
    secret = tmp_path / "secret"
    secret.write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as server:
        order = {
            "home": str(Path.home()),
            "secret": str(secret),
            "port": server.getsockname()[1],
            "pid": os.getpid(),
        }
        done = run_confined(HOSTILE, tree, json.dumps(order), sandbox)
    found = json.loads(done.text.splitlines()[-1])
    assert found.pop("reopen_input") == "PermissionError"
    assert found.pop("write_home") in ("FileNotFoundError", "PermissionError", "OSError")
    assert found == {
        "read_secret": "FileNotFoundError",
        "write_tree": "OSError",
        "write_packages": "OSError",
        "connect": "ConnectionRefusedError",
        "variables": "TypeError",
        "kill": "ProcessLookupError",
        "fill": "OSError",
        "fill_input": "PermissionError",
        "bomb": "refused",
        "memory": "MemoryError",
    }
    assert list(tree.iterdir()) == []


def test_a_flood_of_output_is_cut_off(tree: Path, sandbox: Sandbox) -> None:
    flood = "import os\nwhile True: os.write(1, b'x' * 65536)"
    done = run_confined(flood, tree, "", sandbox, most_output=1_000_000)
    assert len(done.text) == 1_000_000
    assert done.ending == "it printed more than 1 MB: ended"


@pytest.mark.parametrize("closes", [False, True])
def test_what_hangs_is_ended(tree: Path, sandbox: Sandbox, closes: bool) -> None:
    hangs = "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    hangs += "os.close(1), os.close(2)\n" if closes else ""
    done = run_confined(f"{hangs}while True: time.sleep(9)", tree, "", sandbox, limit_s=1)
    assert done.ending == "not done after 1 s: ended"


def test_what_it_leaves_behind_ends_with_it(tree: Path, sandbox: Sandbox) -> None:
    """The pipe closes, so no process of the sandbox is left that could hold it."""
    leaves = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(600)\nprint('done')"
    done = run_confined(leaves, tree, "", sandbox)
    assert (done.text.strip(), done.ending) == ("done", "exit code 0")


def test_without_a_sandbox_time_and_output_are_limited_all_the_same(tree: Path) -> None:
    assert run_confined("while True: pass", tree, "", None, limit_s=1).ending.startswith("not done")
    flood = "while True: print('x' * 1000)"
    assert "more than" in run_confined(flood, tree, "", None, most_output=10_000).ending
